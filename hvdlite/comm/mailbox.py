"""Messages with tags among ranks that are threads: the `isend` and `irecv` of `hvdlite.comm.local`.

A rank has a mailbox for each channel. The mailbox gives a message to the oldest receive that fits it. If there is no such
receive, the message stays in the mailbox until one comes. So messages of one source and tag are received in the order in which
they were sent, as in MPI.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from hvdlite.comm.messages import wrong_size
from hvdlite.comm.naps import wait_until
from hvdlite.protocols import ANY, Array


class Parcel(NamedTuple):
    """A message with a tag, as it lies in a mailbox.

    Attributes:
        source: The rank in the group that sent the message.
        tag: The tag of the message.
        data: A copy of the sender's array.
        departure: The time of departure by the sender's clock, in virtual seconds.
    """

    source: int
    tag: int
    data: Array
    departure: float


class Mailbox:
    """The messages that have arrived for one rank, and the receives that this rank has posted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: list[Parcel] = []
        self._receives: list[LocalReceive] = []

    def put(self, parcel: Parcel) -> None:
        """Give `parcel` to the oldest receive that fits it, or keep it."""
        with self._lock:
            receive = next((each for each in self._receives if each.takes(parcel)), None)
            if receive is None:
                self._arrived.append(parcel)
            else:
                self._receives.remove(receive)
                receive.parcel = parcel

    def post(self, receive: LocalReceive) -> None:
        """Give the oldest message that fits to `receive`, or keep the receive until such a message arrives."""
        with self._lock:
            index = next((index for index, parcel in enumerate(self._arrived) if receive.takes(parcel)), None)
            if index is None:
                self._receives.append(receive)
            else:
                receive.parcel = self._arrived.pop(index)

    def withdraw(self, receive: LocalReceive) -> bool:
        """Remove `receive` from the mailbox. Return False if it has its message already."""
        with self._lock:
            if receive not in self._receives:
                return False
            self._receives.remove(receive)
            return True


class LocalSend:
    """The `Request` of a send between threads. The send is complete at once, because its data was copied.

    Args:
        finish: A function that sets the sender's clock. It is called when the sender tests or awaits the request.
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
    """The `Request` of a receive between threads.

    Args:
        mailbox: The mailbox of this rank.
        data: The flat array that the message fills.
        source, tag: See `Transport.irecv`.
        check: A function that raises if some rank has failed: then the message may never come.
        finish: A function that sets the receiver's clock. It is called once, with the message, in the thread that finds it.

    Attributes:
        parcel: The message, or None before it arrives. The mailbox sets it.
        source: See `Request.source`.
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
        """Say whether this receive waits for the message `parcel`."""
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
