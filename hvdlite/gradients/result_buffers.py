"""Where the gradients and the results of a bucket lie on one host.

A rank may have several places for its gradients, or for its results (`hvdlite.gradients.bucket`). `ResultBuffers` are one
choice of such places for all ranks of the host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from hvdlite.gradients.segments import Memory, Stretch
from hvdlite.protocols import Array


class ResultBuffers:
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
