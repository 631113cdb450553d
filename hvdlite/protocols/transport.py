"""Messages between two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hvdlite.protocols.types import Array

ANY = -1
"""The source of a message that any rank may send."""
LARGEST_TAG = 32_000
"""MPI promises tags up to 32,767, of which a transport needs some for itself."""


class Request(Protocol):
    """A message under way, which `isend` or `irecv` began.

    The memory of the message belongs to the request until it is over: of a send it must not be changed, of a receive not be
    looked at. A request that is dropped goes on, and keeps that memory.
    """

    @property
    def source(self) -> int | None:
        """Of a receive that is over: the rank that sent the message. None before, of a send, and after `cancel`."""
        ...

    def test(self) -> bool:
        """Whether the message has been sent, or received. Never waits.

        Raises:
            ArgumentError: The message that arrived has another size than the array that was to receive it.
            PeerLeftError, CommunicationError: It can never arrive.
        """
        ...

    def wait(self) -> None:
        """Return when `test` is true. Errors as for `test`.

        A request of a `Transport` waits with no owner, as `Transport.recv` does; one of a `Channel` has the watchdog.
        """
        ...

    def cancel(self) -> bool:
        """Give a receive up.

        Returns:
            Whether the receive is over without a message. False of a message that is there already, and of every send: what
            is on its way cannot be called back.
        """
        ...


class Transport(Protocol):
    """Point-to-point messages between the ranks of one group: what an algorithm is written on.

    There are three kinds of message, which never meet. Arrays whose size the receiver knows (`send`, `recv`, `sendrecv`) block;
    they come in order for each pair of ranks. Arrays with a tag (`isend`, `irecv`) do not block; they come in order for each
    pair of ranks and tag. Control messages (`post`, `poll`) are small and of any size; they are picked up when somebody looks,
    in order for each pair of ranks.
    """

    @property
    def rank(self) -> int:
        """This process in the group, 0 … size - 1."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        ...

    @property
    def medium(self) -> str:
        """What carries the messages, for people: such as "Open MPI v5.0.11"."""
        ...

    def send(self, data: Array, dest: int) -> None:
        """Send `data`; it may be overwritten when the call returns. May block until it is received."""
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
            data: Shape ``(n,)``, C-contiguous; n may be 0.
            dest: A rank of the group; this one too.
            tag: From 0 to `LARGEST_TAG`.

        Raises:
            ArgumentError: An argument is not as described.
        """
        ...

    def irecv(self, data: Array, source: int = ANY, tag: int = 0) -> Request:
        """Begin to receive an array that was sent by `isend` with this tag.

        Args:
            data: Where it is put: of the dtype and the length that were sent, C-contiguous, writable.
            source: A rank of the group, or `ANY`.
            tag: As for `isend`.

        Raises:
            ArgumentError: An argument is not as described.
        """
        ...

    def post(self, message: bytes, dest: int) -> None:
        """Send a control message without waiting for it to be read."""
        ...

    def poll(self) -> tuple[int, bytes] | None:
        """The next control message that has arrived and its sender, or None."""
        ...

    def duplicate(self) -> Transport:
        """A transport over the same ranks whose messages never mix with this one's. Collective."""
        ...

    def subgroup(self, ranks: Sequence[int]) -> Transport:
        """A transport over `ranks` (sorted ranks of this group). Called by these ranks and no others."""
        ...

    def close(self) -> None:
        """Release what the transport holds. Local."""
        ...
