"""The contract of messages between two ranks of a group. Every wait for a message has an owner."""

from __future__ import annotations

import enum
from contextlib import AbstractContextManager
from typing import Protocol

from hvdlite.protocols.transport import ANY, Request
from hvdlite.protocols.types import Array


class WaitKind(enum.Enum):
    """How the watchdog treats a wait for a message."""

    PEER = "peer"
    """The other rank works on the message. The stall check reports the wait, and ends it at the time limit."""
    SERVICE = "service"
    """A server waits for requests. The wait may last for ever. It ends when all ranks that could send a request have left."""
    END = "end"
    """This rank waits for the end of all ranks. The stall check treats it like `PEER`. Ranks that have left are no failure."""


class Channel(Protocol):
    """Messages among the ranks of a group that never mix with those of another channel.

    The watchdog owns every wait. A wait for a rank that leaves the job ends with `PeerLeftError`; so does a wait for `ANY` when
    all others have left. The other requests of the channel go on.
    """

    @property
    def rank(self) -> int:
        """The rank of this process in the group, from 0 to ``size - 1``."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        ...

    def isend(self, data: Array, dest: int, tag: int = 0) -> Request:
        """See `Transport.isend`.

        Raises:
            ArgumentError: See `Transport.isend`.
            HvdliteError: The channel was closed, or some rank has given up a wait on it.
        """
        ...

    def irecv(self, data: Array, source: int = ANY, tag: int = 0) -> Request:
        """See `Transport.irecv`. The errors are those of `isend`."""
        ...

    def guarded(
        self, what: str, kind: WaitKind = WaitKind.PEER, beside_threads: bool = False, asks_all: bool = False
    ) -> AbstractContextManager[None]:
        """Return a context manager that describes the waits of this thread in its body, on requests of this channel.

        Args:
            what: What the thread waits for, in words, for reports and errors.
            kind: The kind of the waits. Outside of the context manager a wait is `WaitKind.PEER`.
            beside_threads: Whether other threads of this process are to run meanwhile. Such a wait naps from its beginning. If
                not, it first looks for its message again and again, which takes Python's lock from the other threads.
            asks_all: Whether a report of the wait says where every rank of the group is, not only the sender of the message.
                The sender may be a server that itself waits for others.
        """
        ...

    def break_off(self, what: str, error: BaseException) -> None:
        """Tell the other ranks at once that this rank has left the use of this channel in the middle.

        Their waits, and those of this rank, end with an error, and nobody can use the channel any more.

        Args:
            what: What this rank has left, in words.
            error: The reason.
        """
        ...

    def close(self) -> None:
        """End every wait on this rank and release everything. This does not wait for other ranks."""
        ...
