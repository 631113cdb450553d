"""Watches the work that groups launch on their GPUs, for no thread waits for it and would notice that it can never end.

A rank that leaves the job says how many launches it has made with each group. If another rank has launched more than that, its
work can never end, and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from hvdlite.errors import HvdliteError, PeerLeftError
from hvdlite.ranks.topology import Members

Launcher = tuple[int, int]
"""The number of a group, and how many launchers were made for the group before: a name that all of its ranks know."""


class LaunchedWork(Protocol):
    """Work that goes on on a GPU after the calls that began it have returned.

    `hvdlite.comm.gpu.collectives.DeviceCollectives` is such work.
    """

    @property
    def launched(self) -> int:
        """How many calls have launched work so far."""
        ...

    def look(self) -> None:
        """Find out whether some work has failed, and if so end it."""
        ...

    def fail(self, error: HvdliteError) -> None:
        """End all work that goes on; later calls raise `error`."""
        ...


class LaunchWatch:
    """Knows what one rank has launched with its groups, and how much the ranks that have left the job had launched."""

    def __init__(self) -> None:
        self._work: dict[Launcher, tuple[Members, LaunchedWork]] = {}
        self._made: dict[int, int] = {}
        self._launched_by: dict[int, Mapping[Launcher, int]] = {}

    def add(self, members: Members, work: LaunchedWork) -> Callable[[], None]:
        """Watch the work that this rank launches with a group. All ranks of the group call this in the same order.

        Returns:
            A function that ends the watch.
        """
        name = members.id, self._made.get(members.id, 0)
        self._made[members.id] = name[1] + 1
        self._work[name] = members, work

        def forget() -> None:
            self._work.pop(name, None)

        return forget

    def counts(self) -> dict[Launcher, int]:
        """Return how many launches this rank has made, by launcher. The rank tells this to the others when it leaves."""
        return {name: work.launched for name, (_, work) in list(self._work.items())}

    def hear(self, rank: int, counts: Mapping[Launcher, int]) -> None:
        """Take the message that a rank has left the job, with the number of its launches by launcher."""
        self._launched_by[rank] = counts

    def check(self) -> None:
        """End the work that has failed, and the work that needs a rank which has left."""
        for name, (members, work) in list(self._work.items()):
            work.look()
            for rank in members.ranks:
                if work.launched > self._launched_by.get(rank, {}).get(name, work.launched):
                    work.fail(
                        PeerLeftError(f"rank {rank} has left the job, and this rank needs it for what it has launched.")
                    )
