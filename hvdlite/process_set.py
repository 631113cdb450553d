"""A subset of the ranks that does operations of its own, at the same time as others, overlapping or not."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hvdlite.errors import ArgumentError


class ProcessSet:
    """Some of the ranks. Takes effect when every rank has passed an equal one to `add_process_set` or `init`.

    Args:
        ranks: World ranks, in any order, each once.

    Attributes:
        ranks: The world ranks, ascending. A rank's number within the set is its place in this order.
        process_set_id: 0 for the set of all ranks; None until the set is added, and again after it is removed.

    Raises:
        ArgumentError: `ranks` is empty or has a rank twice or something that is no rank.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        given = list(ranks)
        for rank in given:
            if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 0:
                raise ArgumentError(f"ProcessSet({given}): {rank!r} is not a rank; expected whole numbers from 0.")
        self.ranks: tuple[int, ...] = tuple(sorted(int(rank) for rank in given))
        if len(set(self.ranks)) != len(self.ranks):
            raise ArgumentError(f"ProcessSet({given}): a rank is there more than once.")
        if not self.ranks:
            raise ArgumentError("ProcessSet([]): expected at least one rank.")
        self.process_set_id: int | None = None
        self._world_rank: int | None = None

    def bind(self, process_set_id: int | None, world_rank: int | None) -> None:
        """World only: the set was added, on rank `world_rank`, or removed (None)."""
        self.process_set_id = process_set_id
        self._world_rank = world_rank

    def size(self) -> int | None:
        """The number of ranks in the set; None if the set is not in effect."""
        return None if self._world_rank is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's number within the set; None if it is not in it, or the set is not in effect."""
        return self.ranks.index(self._world_rank) if self.included() and self._world_rank is not None else None

    def included(self) -> bool | None:
        """Whether this process is in the set; None if the set is not in effect."""
        return None if self._world_rank is None else self._world_rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet({list(self.ranks)}, id={self.process_set_id})"
