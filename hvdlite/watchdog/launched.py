"""Watches what groups launch on their GPUs: nobody waits for a launch, so nobody would notice that it can never end.

A rank that leaves the job says how many launches it has made with each group. What another rank has launched beyond that
can never end, and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from hvdlite.errors import HvdliteError, PeerLeftError
from hvdlite.topology import Members

Launcher = tuple[int, int]
"""The number of a group, and how many times something was made for it before: a name that all of its ranks know."""


class LaunchedWork(Protocol):
    """What goes on on a GPU after the calls that began it have returned: `hvdlite.gpu.collectives.DeviceCollectives`."""

    @property
    def launched(self) -> int:
        """How many calls there have been."""
        ...

    def look(self) -> None:
        """Find out whether something has failed, and if so end it."""
        ...

    def fail(self, error: HvdliteError) -> None:
        """End all that goes on."""
        ...


class LaunchWatch:
    """What one rank has launched with its groups, and what the ranks that have left had launched."""

    def __init__(self) -> None:
        self._work: dict[Launcher, tuple[Members, LaunchedWork]] = {}
        self._made: dict[int, int] = {}
        self._launched_by: dict[int, Mapping[Launcher, int]] = {}

    def add(self, members: Members, work: LaunchedWork) -> Callable[[], None]:
        """Watch this rank's end of what a group launches. All its ranks call this, in the same order.

        Returns:
            A function that ends this.
        """
        name = members.id, self._made.get(members.id, 0)
        self._made[members.id] = name[1] + 1
        self._work[name] = members, work

        def forget() -> None:
            self._work.pop(name, None)

        return forget

    def counts(self) -> dict[Launcher, int]:
        """How many launches this rank has made, for its goodbye."""
        return {name: work.launched for name, (_, work) in list(self._work.items())}

    def hear(self, rank: int, counts: Mapping[Launcher, int]) -> None:
        """A rank has left the job, and had launched so much."""
        self._launched_by[rank] = counts

    def check(self) -> None:
        """End what has failed, and what needs a rank that has left."""
        for name, (members, work) in list(self._work.items()):
            work.look()
            for rank in members.ranks:
                if work.launched > self._launched_by.get(rank, {}).get(name, work.launched):
                    work.fail(
                        PeerLeftError(f"rank {rank} has left the job, and this rank needs it for what it has launched.")
                    )
