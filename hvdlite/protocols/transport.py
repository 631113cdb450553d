"""Messages between two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hvdlite.protocols.types import Array


class Transport(Protocol):
    """Point-to-point messages between the ranks of one group: what an algorithm is written on.

    Two kinds of message, which never meet: arrays whose size the receiver knows (`send`, `recv`,
    `sendrecv`: blocking, in order for each pair of ranks), and small letters of any size that are
    posted without blocking and picked up when somebody looks (`post`, `poll`: in order for each
    pair of ranks).
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

    def post(self, letter: bytes, dest: int) -> None:
        """Send a letter without waiting for it to be read."""
        ...

    def poll(self) -> tuple[int, bytes] | None:
        """The next letter that has arrived and its sender, or None."""
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
