"""Watches the work that groups launch on their GPUs. Nobody waits for a launch, so nobody would notice that it never ends.

A rank that leaves the job tells how many launches it has made in each group. If another rank of the group has launched more,
then its later launches can never end, and they fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from hvdlite.errors import HvdliteError, PeerLeftError
from hvdlite.topology import Members

Launcher = tuple[int, int]
"""The name of a `LaunchedWork` that all ranks know: the number of its group, and how many were made in that group before."""


class LaunchedWork(Protocol):
    """Something that launches work on a GPU which goes on after the call: `hvdlite.gpu.collectives.DeviceCollectives`."""

    @property
    def launched(self) -> int:
        """The number of launches so far."""
        ...

    def look(self) -> None:
        """End the launched work if it has failed."""
        ...

    def fail(self, error: HvdliteError) -> None:
        """End all launched work with `error`."""
        ...


class LaunchWatch:
    """The launched work of one rank in its groups, and the counts of the ranks that have left the job."""

    def __init__(self) -> None:
        self._work: dict[Launcher, tuple[Members, LaunchedWork]] = {}
        self._made: dict[int, int] = {}
        self._launched_by: dict[int, Mapping[Launcher, int]] = {}

    def add(self, members: Members, work: LaunchedWork) -> Callable[[], None]:
        """Watch the launches of this rank in a group. All ranks of the group call this, in the same order.

        Returns:
            A function that stops watching `work`.
        """
        name = members.id, self._made.get(members.id, 0)
        self._made[members.id] = name[1] + 1
        self._work[name] = members, work

        def forget() -> None:
            self._work.pop(name, None)

        return forget

    def counts(self) -> dict[Launcher, int]:
        """Return the number of launches of this rank by name. The rank sends them when it leaves the job."""
        return {name: work.launched for name, (_, work) in list(self._work.items())}

    def hear(self, rank: int, counts: Mapping[Launcher, int]) -> None:
        """Record that a rank has left the job with these numbers of launches."""
        self._launched_by[rank] = counts

    def check(self) -> None:
        """End work that has failed, and work that needs a rank that has left the job."""
        for name, (members, work) in list(self._work.items()):
            work.look()
            for rank in members.ranks:
                if work.launched > self._launched_by.get(rank, {}).get(name, work.launched):
                    work.fail(
                        PeerLeftError(f"rank {rank} has left the job, and this rank needs it for what it has launched.")
                    )
