"""Adasum: gradients that point in the same direction are averaged, and orthogonal gradients are added."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from hvdlite.algorithms.fold import Core
from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import Array, Transport

_CHUNK = 8192
"""The number of elements of a dot product in float64: so few stay in the cache, and BLAS uses one thread."""


def adasum(transport: Transport, data: Array, counts: Sequence[int]) -> None:
    """Combine tensors over the ranks by Adasum, in place, to the same bits on every rank.

    Two vectors a and b become ::

        (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b

    which is their mean if they are parallel and their sum if they are orthogonal; zero takes no part. More vectors are
    combined in pairs, pairs of pairs and so on: the tree of `Core`, whose ranks are neighbours, so for 8, 6 and 3 ranks
    ((01)(23))((45)(67)), ((01)(23))(45) and (01)2. The result depends on the order; it is the same in every run.

    Recursive halving, as in `rabenseifner`: partners halve the range that both work on, and each gets the other's half of
    what it keeps. Neither has the whole of a or b, so each takes the dot products of its part, and those are summed over
    the ranks that have the other parts. Then an allgather backwards. All tensors travel together.

    Cost for P = 2ᵏ ranks, n bytes and T tensors: (2k + k(k+1)/2)α + 2(P-1)/P·nβ, and 24T bytes in k(k+1)/2 of the messages.
    If P is no power of two, the extra ranks are folded in before and folded out after (`Core`).

    Args:
        transport: A transport over the ranks.
        data: The tensors one after the other: float32 or float64, of shape ``(sum(counts),)``.
        counts: The number of elements of each tensor. Each tensor is combined by itself, with its own dot products in float64.
            A vector of a norm below 1e-154, whose square underflows, may count as zero.

    Source: Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021, arXiv:2006.02924,
    section 3 and algorithm 1.
    """
    core = Core(transport.size)
    index = core.index(transport.rank)
    tensors = _Tensors(counts)
    scratch = np.empty_like(data)

    def combine(into: Array, other: Array) -> None:
        tensors.combine(into, other, tensors.dots(into, other, 0), 0)

    core.fold_in(transport, data, scratch, combine)
    if index is not None:
        start, stop = 0, data.size
        exchanges: list[tuple[int, slice, slice]] = []
        distance = 1
        while distance < core.size:
            partner = core.rank(index ^ distance)
            middle = (start + stop) // 2
            lower, upper = slice(start, middle), slice(middle, stop)
            given, kept = (lower, upper) if index & distance else (upper, lower)
            start, stop = kept.start, kept.stop
            incoming = scratch[: stop - start]
            transport.sendrecv(data[given], partner, incoming, partner)
            # For the sum, a is the vector of the lower ranks on every rank.
            order = [0, 2, 1] if index & distance else [0, 1, 2]
            dots = tensors.dots(data[kept], incoming, start)[order]
            _sum_over_block(transport, core, index, 2 * distance, dots)
            tensors.combine(data[kept], incoming, dots[order], start)
            exchanges.append((partner, given, kept))
            distance *= 2
        for partner, given, kept in reversed(exchanges):
            transport.sendrecv(data[kept], partner, data[given], partner)
    core.fold_out(transport, data)


def check_adasum(dtype: str) -> None:
    """Raise UnsupportedTensorError unless `dtype` (a name as in `TensorInfo`) is a real floating-point type."""
    if not dtype.startswith(("float", "bfloat")):
        raise UnsupportedTensorError(
            f"Adasum of {dtype} is not defined: expected float16, bfloat16, float32 or float64. Use Sum or Average."
        )


def _sum_over_block(transport: Transport, core: Core, index: int, size: int, dots: Array) -> None:
    """Sum `dots` by recursive doubling over the aligned block of `size` ranks of the core that contains `index`.

    Every rank adds the same pairs of numbers, and a + b equals b + a. So all ranks have the same bits.
    """
    incoming = np.empty_like(dots)
    distance = 1
    while distance < size:
        partner = core.rank(index ^ distance)
        transport.sendrecv(dots.reshape(-1), partner, incoming.reshape(-1), partner)
        dots += incoming
        distance *= 2


class _Tensors:
    """The positions of tensors in a flat vector, and arithmetic on a piece of this vector, tensor by tensor."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._bounds = [0, *accumulate(counts)]
        self._wide = np.empty((2, min(_CHUNK, max(counts, default=0))))

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, slice]]:
        """Yield the tensors with elements in ``start … stop``, each with the slice of these elements, counted from `start`."""
        tensor = bisect_right(self._bounds, start) - 1
        while start < stop and self._bounds[tensor] < stop:
            first, last = max(self._bounds[tensor], start), min(self._bounds[tensor + 1], stop)
            if first < last:
                yield tensor, slice(first, last)
            tensor += 1

    def dots(self, a: Array, b: Array, start: int) -> Array:
        """Return, for each tensor, the dot products of two pieces of the vector that begin at `start`.

        Returns:
            a·b, a·a and b·b, of shape ``(3, tensors)`` and float64; zero for tensors that have no element in the piece.
        """
        dots = np.zeros((3, len(self._bounds) - 1))
        for tensor, part in self._parts(start, start + a.size):
            for first in range(part.start, part.stop, _CHUNK):
                last = min(first + _CHUNK, part.stop)
                wide_a, wide_b = self._wide[0, : last - first], self._wide[1, : last - first]
                wide_a[:] = a[first - start : last - start]
                wide_b[:] = b[first - start : last - start]
                dots[:, tensor] += (wide_a @ wide_b, wide_a @ wide_a, wide_b @ wide_b)
        return dots

    def combine(self, a: Array, b: Array, dots: Array, start: int) -> None:
        """Overwrite the piece `a`, which begins at `start`, with its combination with `b`. The content of `b` is lost."""
        products, squares = dots[0], dots[1:]
        shares = np.divide(products, 2 * squares, out=np.zeros_like(squares), where=squares != 0)
        for tensor, part in self._parts(start, start + a.size):
            of_a, of_b = (1 - shares[:, tensor]).tolist()
            mine, other = a[part.start - start : part.stop - start], b[part.start - start : part.stop - start]
            np.multiply(mine, of_a, out=mine)
            np.multiply(other, of_b, out=other)
            mine += other
