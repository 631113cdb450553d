"""`Segment`: elements of a bucket that one rank sums, with the memory of all ranks of the host."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from hvdlite.gradients.layout import Block
from hvdlite.protocols import Array
from hvdlite.tensors.reduction import Reduction


class Memory:
    """One block of the layout, on all ranks of the host.

    Args:
        block: The layout.
        how: How values are summed.
        gradients: For each rank of the host, its gradients.
        results: For each rank of the host, where it gets the result: the same list of arrays, or another one.
    """

    def __init__(self, block: Block, how: Reduction, gradients: list[Array], results: list[Array]) -> None:
        self.block = block
        self.how = how
        self.gradients = gradients
        self.results = results


class Cut(NamedTuple):
    """A chunk of a segment, without this rank's own gradient."""

    part: slice
    before: tuple[Array, ...]
    """The gradients of the ranks before this one on the host."""
    after: tuple[Array, ...]
    others: tuple[Array, ...]
    """The results of the other ranks of the host."""


class Chunk(NamedTuple):
    """A chunk of a segment: the sources of all ranks, this rank's result, and the results of the other ranks."""

    sources: tuple[Array, ...]
    result: Array
    others: tuple[Array, ...]


class Owned(NamedTuple):
    """Consecutive elements of a block that one rank owns.

    Attributes:
        start: The first element, counted in the block.
        stop: The element after the last one.
        tensor: The number of the large tensor that the elements belong to; None if they belong to any number of tensors.
    """

    start: int
    stop: int
    tensor: int | None


class Segment:
    """Elements that this rank sums, with the memory of all ranks.

    Args:
        memory: The block that the elements lie in.
        owned: The elements.
        rank: This rank's number on the host.
        length: The number of elements of a chunk.
        share: Whether the other ranks get the result.

    Attributes:
        how: How the elements are summed.
        tensor: See `Owned`.
    """

    def __init__(self, memory: Memory, owned: Owned, rank: int, length: int, share: bool) -> None:
        self.how = memory.how
        self.tensor = owned.tensor
        elements = owned.stop - owned.start
        views = [array[owned.start : owned.stop] for array in memory.gradients]
        self._in_place = memory.results is memory.gradients
        results = views if self._in_place else [array[owned.start : owned.stop] for array in memory.results]
        self._result = results[rank]
        self.cuts = []
        for lo, hi in itertools.pairwise([*range(0, elements, length), elements]):
            parts = [view[lo:hi] for view in views]
            others = [result[lo:hi] for result in results[:rank] + results[rank + 1 :]] if share else []
            self.cuts.append(Cut(slice(lo, hi), tuple(parts[:rank]), tuple(parts[rank + 1 :]), tuple(others)))
        self._home_chunks = self._chunks(views[rank], self._result)

    def chunks(self, placed: Array | None, keep: bool) -> tuple[list[Chunk], bool]:
        """Return the chunks to sum.

        Args:
            placed: Where this rank's gradient lies, if it is not in the bucket's memory; else None.
            keep: Whether the result shall lie in `placed` too.

        Returns:
            The chunks; and whether results overwrite this rank's gradients.
        """
        if placed is None:
            return self._home_chunks, self._in_place
        return self._chunks(placed, placed if keep else self._result), keep

    def _chunks(self, gradient: Array, result: Array) -> list[Chunk]:
        return [Chunk((*cut.before, gradient[cut.part], *cut.after), result[cut.part], cut.others) for cut in self.cuts]
