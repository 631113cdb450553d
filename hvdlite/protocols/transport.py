"""The contract of messages between two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hvdlite.protocols.types import Array

ANY = -1
"""The source for a receive that takes a message from any rank."""
LARGEST_TAG = 32_000
"""The largest tag. MPI promises tags up to 32,767, and a transport needs some for itself."""


class Request(Protocol):
    """A message that `isend` or `irecv` has begun.

    The memory of the message belongs to the request until the request is over: the caller must not change the array of a send,
    nor read the array of a receive. A request that the program drops goes on, and keeps that memory.
    """

    @property
    def source(self) -> int | None:
        """The rank that sent the message, once a receive is over. None before that, for a send, and after `cancel`."""
        ...

    def test(self) -> bool:
        """Say whether the message has been sent or received. This never waits.

        Raises:
            ArgumentError: The message has another size than the array of the receive.
            PeerLeftError, CommunicationError: The message can never arrive.
        """
        ...

    def wait(self) -> None:
        """Wait until `test` returns True. The errors are those of `test`.

        The watchdog owns a wait on a request of a `Channel`. A wait on a request of a `Transport` has no owner, like `recv`.
        """
        ...

    def cancel(self) -> bool:
        """Give up a receive.

        Returns:
            True if the receive is over without a message. False if its message has arrived already. False for every send,
            because a sent message cannot be called back.
        """
        ...


class Transport(Protocol):
    """Point-to-point messages between the ranks of one group. The algorithms for collectives are written on this contract.

    There are three kinds of messages, which never mix. Arrays whose size the receiver knows (`send`, `recv`, `sendrecv`) block,
    and arrive in order for each pair of ranks. Arrays with a tag (`isend`, `irecv`) do not block, and arrive in order for each
    pair of ranks and tag. Control messages (`post`, `poll`) are small byte strings of any length. They arrive in order for each
    pair of ranks, when the receiver polls.
    """

    @property
    def rank(self) -> int:
        """The rank of this process in the group, from 0 to ``size - 1``."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        ...

    @property
    def medium(self) -> str:
        """The name of the medium of the messages for people to read, such as "Open MPI v5.0.11"."""
        ...

    @property
    def polls(self) -> bool:
        """Whether calls that wait are begun and tested again and again, so that they can be ended: small ones take longer."""
        ...

    def send(self, data: Array, dest: int) -> None:
        """Send `data`. The call may block until `data` is received; when it returns, the caller may overwrite `data`."""
        ...

    def recv(self, data: Array, source: int) -> None:
        """Receive exactly ``data.size`` elements from `source` into `data`."""
        ...

    def sendrecv(self, send: Array, dest: int, recv: Array, source: int) -> None:
        """Send and receive at the same time. The two arrays must not overlap."""
        ...

    def isend(self, data: Array, dest: int, tag: int = 0) -> Request:
        """Begin to send an array.

        Args:
            data: A C-contiguous array of shape ``(n,)``; n may be 0.
            dest: A rank of the group; it may be this rank.
            tag: A number from 0 to `LARGEST_TAG`.

        Raises:
            ArgumentError: An argument is out of its range, or `data` has another layout.
        """
        ...

    def irecv(self, data: Array, source: int = ANY, tag: int = 0) -> Request:
        """Begin to receive an array that was sent by `isend` with this tag.

        Args:
            data: The array for the message: C-contiguous and writable, of the dtype and the length that were sent.
            source: A rank of the group, or `ANY`.
            tag: The tag of the message, from 0 to `LARGEST_TAG`.

        Raises:
            ArgumentError: An argument is out of its range, or `data` has another layout.
        """
        ...

    def post(self, message: bytes, dest: int) -> None:
        """Send a control message. This does not wait until the message is read."""
        ...

    def has_message(self) -> bool:
        """Say whether `poll` would return a control message, or raise an error. No message is taken."""
        ...

    def poll(self) -> tuple[int, bytes] | None:
        """Return the sender and the bytes of the next control message that has arrived, or None."""
        ...

    def duplicate(self) -> Transport:
        """Return a transport over the same ranks, whose messages never mix with those of this one. All ranks call this."""
        ...

    def subgroup(self, ranks: Sequence[int]) -> Transport:
        """Return a transport over `ranks` (sorted ranks of this group). Exactly these ranks call this."""
        ...

    def close(self) -> None:
        """Release everything. This does not wait for other ranks."""
        ...
