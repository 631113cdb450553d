"""Messages with tags among ranks that are threads: the `isend` and `irecv` of `hvdlite.comm.local`.

A rank has a mailbox for each channel. A message goes to the oldest receive that fits it; if there is none, it waits there for
one. Messages of one source and tag are therefore received in their order, as MPI has it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from hvdlite.comm.messages import wrong_size
from hvdlite.comm.naps import wait_until
from hvdlite.protocols import ANY, Array


class Parcel(NamedTuple):
    """A message.

    Attributes:
        source: The rank in the group that sent it.
        tag: Its tag.
        data: A copy of what was sent.
        departure: The sender's clock when it left, in virtual seconds.
    """

    source: int
    tag: int
    data: Array
    departure: float


class Mailbox:
    """What has arrived for a rank, and what the rank waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: list[Parcel] = []
        self._receives: list[LocalReceive] = []

    def put(self, parcel: Parcel) -> None:
        """A message arrives."""
        with self._lock:
            receive = next((each for each in self._receives if each.takes(parcel)), None)
            if receive is None:
                self._arrived.append(parcel)
            else:
                self._receives.remove(receive)
                receive.parcel = parcel

    def post(self, receive: LocalReceive) -> None:
        """The rank waits for a message from now on."""
        with self._lock:
            index = next((index for index, parcel in enumerate(self._arrived) if receive.takes(parcel)), None)
            if index is None:
                self._receives.append(receive)
            else:
                receive.parcel = self._arrived.pop(index)

    def withdraw(self, receive: LocalReceive) -> bool:
        """The rank waits no more. Returns whether it did until now."""
        with self._lock:
            if receive not in self._receives:
                return False
            self._receives.remove(receive)
            return True


class LocalSend:
    """A send, which is over at once: its data was copied.

    Args:
        finish: Called when the sender waits for it: sets its clock.
    """

    source: int | None = None

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def test(self) -> bool:
        self._finish()
        return True

    def wait(self) -> None:
        self._finish()

    def cancel(self) -> bool:
        return False


class LocalReceive:
    """A receive.

    Args:
        mailbox: This rank's.
        data: Where the message is put.
        source, tag: As for `Transport.irecv`.
        check: Raises if some rank has failed, so that the message may never come.
        finish: Called once with the message, in the thread that finds it: sets the receiver's clock.

    Attributes:
        parcel: The message, when it is there; set by the mailbox.
        source: As `Request.source`.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        data: Array,
        source: int,
        tag: int,
        check: Callable[[], None],
        finish: Callable[[Parcel], None],
    ) -> None:
        self._mailbox, self._data, self._from, self._tag = mailbox, data, source, tag
        self._check, self._finish = check, finish
        self._over = False
        self.parcel: Parcel | None = None
        self.source: int | None = None
        mailbox.post(self)

    def takes(self, parcel: Parcel) -> bool:
        """Whether a message is one that this receive waits for."""
        return self._from in (ANY, parcel.source) and self._tag == parcel.tag

    def test(self) -> bool:
        if self._over:
            return True
        parcel = self.parcel
        if parcel is None:
            self._check()
            return False
        self._over = True
        data = self._data
        if parcel.data.size != data.size or parcel.data.dtype != data.dtype:
            expected, sent = (f"{each.size} elements of {each.dtype}" for each in (data, parcel.data))
            raise wrong_size(expected, parcel.source, sent)
        data[...] = parcel.data
        self.source = parcel.source
        self._finish(parcel)
        return True

    def wait(self) -> None:
        wait_until(self.test, lambda: None)

    def cancel(self) -> bool:
        withdrawn = self._mailbox.withdraw(self)
        self._over = self._over or withdrawn
        return withdrawn
