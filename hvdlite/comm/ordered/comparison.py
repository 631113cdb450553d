"""Finds out whether all ranks of a group call the same. Each rank shows a number that stands for its call."""

from __future__ import annotations

from itertools import cycle

import numpy as np

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.protocols import ReduceOp

_CELLS = 2
"""The cells of each rank, used in turn. A cell is written again after a meeting that ranks enter when they have read it."""


class Comparison:
    """Compares the calls of the ranks: in shared memory on one host, which takes a meeting; else by a small allreduce.

    Args:
        collectives: The collectives of the group. All ranks make this object together, and call it in the same order.
    """

    def __init__(self, collectives: HierarchicalCollectives) -> None:
        self._collectives = collectives
        self._rank = collectives.rank
        self._cells: list[memoryview] = []
        if 1 < collectives.size == collectives.host.size:
            memory = collectives.host.allocate(_CELLS * 8)
            self._cells = [memoryview(cells.view(np.int64)) for cells in memory]  # type: ignore[arg-type]  # fast to index
        self._turns = cycle(range(_CELLS))

    def all_show(self, number: int) -> bool:
        """Return whether all ranks show the same number, which is below 2**32. The answer is the same on all ranks."""
        if self._cells:
            turn = next(self._turns)
            self._cells[self._rank][turn] = number
            self._collectives.host.meet()
            return all(cells[turn] == number for cells in self._cells)
        if self._collectives.size == 1:
            return True
        extremes = np.array([number, -number], np.int64)
        self._collectives.flat.allreduce(extremes, ReduceOp.MAX)
        return bool(extremes[0] == -extremes[1])
