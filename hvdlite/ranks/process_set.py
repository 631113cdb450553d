"""`ProcessSet`: a subset of the ranks. Process sets may overlap, and run their own operations at the same time."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from hvdlite.errors import ArgumentError


class ProcessSet:
    """A subset of the ranks. It takes effect when every rank has passed an equal set to `add_process_set` or `init`.

    Args:
        ranks_or_comm: World ranks, in any order, each once; or an mpi4py communicator, whose ranks are taken. If a communicator
            was split, each rank passes its own part, and all parts take effect.

    Attributes:
        members: The world ranks, ascending. A rank's number within the set is its position here. For a communicator, the tuple
            is empty until the set is added.
        communicator: The communicator that was given, or None.
        process_set_id: The number of the set: 0 for the set of all ranks, None while the set is not in effect (before it is
            added, after it is removed, after the end of the job). A job never uses a number twice.

    Raises:
        ArgumentError: `ranks_or_comm` is empty, or contains a rank twice, or something that is not a rank.

    Examples:
        >>> def places():
        ...     pair = hvdlite.add_process_set(hvdlite.ProcessSet([2, 0]))
        ...     return pair.ranks, pair.included(), pair.rank()
        >>> on_ranks(3, places)
        [([0, 2], True, 0), ([0, 2], False, None), ([0, 2], True, 1)]
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
        """The world ranks, ascending, as a new list (Horovod's form of `members`)."""
        return list(self.members)

    @property
    def mpi_comm(self) -> Any:
        """The communicator that was given, or None (Horovod's name of `communicator`)."""
        return self.communicator

    def take_ranks(self, ranks: Iterable[int]) -> None:
        """Set the ranks of the set. Only `World` and `api` call this.

        Raises:
            ArgumentError: See `ProcessSet`.
        """
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
        """Put the set into effect under a number, on rank `world_rank`; out of effect if both are None. For `World` only."""
        self.process_set_id = process_set_id
        self._world_rank = world_rank

    # `int | Any`, not `int | None`: a program that has made the set knows that it is in effect, and need not check.
    def size(self) -> int | Any:
        """Return the number of ranks in the set; None if the set is not in effect."""
        return None if self._world_rank is None else len(self.members)

    def rank(self) -> int | Any:
        """Return this process's number within the set; None if the process is not in the set, or the set is not in effect."""
        return self.members.index(self._world_rank) if self.included() and self._world_rank is not None else None

    def included(self) -> bool | None:
        """Return whether this process is in the set; None if the set is not in effect."""
        return None if self._world_rank is None else self._world_rank in self.members

    def __repr__(self) -> str:
        return f"ProcessSet({list(self.members)}, id={self.process_set_id})"

    def __str__(self) -> str:
        if "horovod" in sys.modules:  # programs for Horovod look for Horovod's words
            return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        return repr(self)
