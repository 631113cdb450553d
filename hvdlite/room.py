"""Where the gradients and the results of a bucket lie on one host, and what this rank sums of them.

A rank may have several places for its gradients, or for its results (`hvdlite.bucket`). A `Room` is one choice of such places
for all ranks of the host.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hvdlite.arithmetic import Arithmetic
from hvdlite.layout import Block
from hvdlite.protocols import Array


class Memory:
    """One block of the layout, on all ranks of the host.

    Attributes:
        gradients: Of each rank: what it contributes.
        results: Of each rank: where it gets the result. The same arrays, or others.
    """

    def __init__(self, block: Block, kernel: Arithmetic, gradients: list[Array], results: list[Array]) -> None:
        self.block = block
        self.kernel = kernel
        self.gradients = gradients
        self.results = results


class Cut(NamedTuple):
    """A chunk of a stretch."""

    part: slice
    before: tuple[Array, ...]
    """The gradients of the ranks before this one on the host."""
    after: tuple[Array, ...]
    others: tuple[Array, ...]
    """The results of the other ranks of the host."""


class Chunk(NamedTuple):
    """A chunk, with what this rank contributes where it is now."""

    sources: tuple[Array, ...]
    result: Array
    others: tuple[Array, ...]


class Owned(NamedTuple):
    """Neighbouring elements that a rank answers for.

    Attributes:
        start, stop: In the block.
        tensor: The large tensor that they belong to, or None: they are of any number of tensors.
    """

    start: int
    stop: int
    tensor: int | None


class Stretch:
    """What this rank sums, with the memory of all ranks.

    Args:
        memory: The block that it lies in.
        owned: Where.
        rank: This rank's number on the host.
        length: Of a chunk, in elements.
        share: Whether the other ranks get the result.

    Attributes:
        kernel: Its arithmetic.
        tensor: As in `Owned`.
    """

    def __init__(self, memory: Memory, owned: Owned, rank: int, length: int, share: bool) -> None:
        self.kernel = memory.kernel
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
        """What to sum, and where to put it.

        Args:
            placed: Where this rank's gradient is, if it is not where it is expected.
            keep: Leave the result there too.

        Returns:
            The chunks; and whether results overwrite this rank's gradients.
        """
        if placed is None:
            return self._home_chunks, self._in_place
        return self._chunks(placed, placed if keep else self._result), keep

    def _chunks(self, gradient: Array, result: Array) -> list[Chunk]:
        return [Chunk((*cut.before, gradient[cut.part], *cut.after), result[cut.part], cut.others) for cut in self.cuts]


class Room:
    """A choice of places for all ranks of a host.

    Args:
        memories: Of each block.
        stretches: What this rank answers for.
        rank: This rank's number on the host.
        lent: Arrays of results are views of these; empty if results are not lent. Whoever holds such a view holds a reference
            to the array behind it, as NumPy leads the view of a view back to that.
    """

    def __init__(
        self, memories: list[Memory], stretches: Iterable[Stretch], rank: int, lent: Sequence[Array] = ()
    ) -> None:
        self.memories = memories
        self.stretches = list(stretches)
        self.gradient_of: dict[int, Array] = {}
        self.result_of: dict[int, Array] = {}
        for memory in memories:
            for index, (start, stop) in memory.block.spans.items():
                self.gradient_of[index] = memory.gradients[rank][start:stop]
                in_place = memory.results is memory.gradients
                self.result_of[index] = self.gradient_of[index] if in_place else memory.results[rank][start:stop]
        self._lent = lent
        self._own: int | None = None

    @property
    def in_use(self) -> bool:
        """Whether somebody holds an array of this room. First asked before one is given away."""
        references = sum(map(sys.getrefcount, self._lent))
        if self._own is None:
            self._own = references
        return references > self._own
