"""A subset of the ranks that does operations of its own, at the same time as others, overlapping or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hvdlite.errors import ArgumentError


class ProcessSet:
    """Some of the ranks. Takes effect when every rank has passed an equal one to `add_process_set` or `init`.

    Args:
        ranks_or_comm: World ranks, in any order, each once; or an mpi4py communicator, whose ranks are taken. Where a
            communicator was split, each rank passes its own part, and all parts take effect.

    Attributes:
        members: The world ranks, ascending; of a communicator, empty until the set is added. A rank's number within the set is
            its place in this order.
        ranks: They as a list, as Horovod has them.
        communicator: The communicator given, if one was.
        process_set_id: 0 for the set of all ranks; None until the set is added, and again after it is removed or the job has
            ended. No two sets of a job have the same number, and none has that of an earlier one.

    Raises:
        ArgumentError: There is no rank, or one twice, or something that is no rank.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        self.process_set_id: int | None = None
        self._world_rank: int | None = None
        self.members: tuple[int, ...] = ()
        self.communicator: Any = ranks_or_comm if hasattr(ranks_or_comm, "Get_group") else None
        if self.communicator is None:
            self.take_ranks(ranks_or_comm)

    @property
    def ranks(self) -> list[int]:
        """The world ranks, ascending: a new list."""
        return list(self.members)

    def take_ranks(self, ranks: Iterable[int]) -> None:
        """World and `api` only: the ranks of the set are these."""
        given = list(ranks)
        for rank in given:
            if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 0:
                raise ArgumentError(f"ProcessSet({given}): {rank!r} is not a rank; expected whole numbers from 0.")
        self.members = tuple(sorted(int(rank) for rank in given))
        if len(set(self.members)) != len(self.members):
            raise ArgumentError(f"ProcessSet({given}): a rank is there more than once.")
        if not self.members:
            raise ArgumentError("ProcessSet([]): expected at least one rank.")

    def bind(self, process_set_id: int | None, world_rank: int | None) -> None:
        """World only: the set is in effect under a number, on rank `world_rank`; or in effect no more (None, None)."""
        self.process_set_id = process_set_id
        self._world_rank = world_rank

    def size(self) -> int | None:
        """The number of ranks in the set; None if the set is not in effect."""
        return None if self._world_rank is None else len(self.members)

    def rank(self) -> int | None:
        """This process's number within the set; None if it is not in it, or the set is not in effect."""
        return self.members.index(self._world_rank) if self.included() and self._world_rank is not None else None

    def included(self) -> bool | None:
        """Whether this process is in the set; None if the set is not in effect."""
        return None if self._world_rank is None else self._world_rank in self.members

    def __repr__(self) -> str:
        return f"ProcessSet({list(self.members)}, id={self.process_set_id})"
