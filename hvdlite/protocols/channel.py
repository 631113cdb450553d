"""Messages between two ranks of a group whose waits have an owner."""

from __future__ import annotations

import enum
from contextlib import AbstractContextManager
from typing import Protocol

from hvdlite.protocols.transport import ANY, Request
from hvdlite.protocols.types import Array


class WaitKind(enum.Enum):
    """What a wait for a message is, to the watchdog."""

    PEER = "peer"
    """The other rank is at work on it: a wait beyond the limits of the stall check is reported, and ends."""
    SERVICE = "service"
    """A server waits for whoever wants something: this may last for ever, and ends when nobody is left who could ask."""


class Channel(Protocol):
    """Messages among the ranks of a group that never mix with those of another channel.

    The watchdog owns every wait. A wait for a rank that leaves the job ends with `PeerLeftError`; so does a wait for `ANY` when
    all others have left. The other requests of the channel go on.
    """

    @property
    def rank(self) -> int:
        """This process in the group, 0 … size - 1."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        ...

    def isend(self, data: Array, dest: int, tag: int = 0) -> Request:
        """See `Transport.isend`.

        Raises:
            ArgumentError: As there.
            HvdliteError: The channel was closed, or a wait on it was given up on some rank.
        """
        ...

    def irecv(self, data: Array, source: int = ANY, tag: int = 0) -> Request:
        """See `Transport.irecv`. Errors as for `isend`."""
        ...

    def guarded(self, what: str, kind: WaitKind = WaitKind.PEER) -> AbstractContextManager[None]:
        """For a with statement: what this thread waits for inside of it, on requests of this channel.

        Args:
            what: What for, in words, as reports and errors name it.
            kind: See `WaitKind`. Outside of the statement a wait is `WaitKind.PEER`.
        """
        ...

    def close(self) -> None:
        """End every wait on this rank, and release what the channel holds. Local."""
        ...
