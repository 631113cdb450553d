"""Where tensors lie in flat memory, and which rank owns which part of it."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from hvdlite.algorithms.slices import split
from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import TensorInfo

ALIGNMENT = 16
"""Tensors and parts begin at multiples of this number of elements, so that vector instructions work on whole cache lines."""


class Span(NamedTuple):
    """The elements of a block that belong to one tensor: the first one, and the one after the last."""

    start: int
    stop: int


class Block(NamedTuple):
    """The tensors of one dtype, one after the other in flat memory.

    Attributes:
        dtype: The dtype of the tensors.
        length: The number of elements, gaps included.
        spans: Where each tensor lies, by its number.
        bounds: Part p is the elements ``bounds[p]`` to ``bounds[p + 1]``.
    """

    dtype: str
    length: int
    spans: dict[int, Span]
    bounds: list[int]


class Piece(NamedTuple):
    """The part of a tensor that one rank owns: elements `start` to `stop` of the flattened tensor."""

    tensor: int
    start: int
    stop: int


def lay_out(
    infos: Sequence[TensorInfo], parts: int, whole: bool = False, tensors: Sequence[int] | None = None
) -> list[Block]:
    """Lay out tensors in one block for each dtype.

    Args:
        infos: The dtype and shape of each tensor of a model.
        parts: The number of parts of each block.
        whole: Never cut a tensor in two: the largest are dealt out first, each to the part that has least. If False, the
            parts are as equal as can be.
        tensors: The numbers of the tensors to lay out, in this order; all by default.

    Raises:
        UnsupportedTensorError: A dtype is neither floating-point nor complex.
    """
    by_dtype: dict[str, list[int]] = {}
    for index in range(len(infos)) if tensors is None else tensors:
        info = infos[index]
        if not info.dtype.startswith(("float", "bfloat", "complex")):
            raise UnsupportedTensorError(
                f"gradients are floating-point numbers; got a parameter of dtype {info.dtype}."
            )
        by_dtype.setdefault(info.dtype, []).append(index)
    blocks = []
    for dtype, members in by_dtype.items():
        room = {index: _padded(math.prod(infos[index].shape)) for index in members}
        groups = _deal(room, parts) if whole else [members]
        spans: dict[int, Span] = {}
        bounds, start = [0], 0
        for group in groups:
            for index in group:
                spans[index] = Span(start, start + math.prod(infos[index].shape))
                start += room[index]
            bounds.append(start)
        if not whole:
            bounds = [0]
            for count in split(start // ALIGNMENT, parts):
                bounds.append(bounds[-1] + count * ALIGNMENT)
        blocks.append(Block(dtype, start, spans, bounds))
    return blocks


def with_equal_parts(block: Block) -> Block:
    """Return a block with parts of equal length, which suit libraries best. The end of the last parts belongs to no tensor.

    Args:
        block: The result of `lay_out` without `whole`.
    """
    parts = len(block.bounds) - 1
    each = -(-block.length // (parts * ALIGNMENT)) * ALIGNMENT
    return block._replace(length=parts * each, bounds=[part * each for part in range(parts + 1)])


def pieces(block: Block, part: int) -> list[Piece]:
    """Return the pieces of tensors in part `part` of a block, without empty ones."""
    begin, end = block.bounds[part], block.bounds[part + 1]
    found = []
    for index, span in block.spans.items():
        start, stop = max(span.start, begin), min(span.stop, end)
        if start < stop:
            found.append(Piece(index, start - span.start, stop - span.start))
    return found


def digest_of(layout: object) -> str:
    """Return 12 hexadecimal digits, by which ranks compare layouts. Different layouts nearly never have the same digits.

    Args:
        layout: An object whose `repr` shows all of it.
    """
    return hashlib.sha256(repr(layout).encode()).hexdigest()[:12]


def _padded(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _deal(room: dict[int, int], parts: int) -> list[list[int]]:
    groups: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    for index in sorted(room, key=lambda index: -room[index]):
        held, part = heapq.heappop(heap)
        groups[part].append(index)
        heapq.heappush(heap, (held + room[index], part))
    return groups
