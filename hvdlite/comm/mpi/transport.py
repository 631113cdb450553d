"""Messages over MPI, through mpi4py. Importing this module starts MPI."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from hvdlite.comm.interrupt import Interrupt
from hvdlite.comm.messages import check_message, wrong_size
from hvdlite.comm.mpi.errors import in_our_words, maps_all_errors, maps_own_errors
from hvdlite.comm.naps import wait_until
from hvdlite.errors import PeerLeftError
from hvdlite.protocols import ANY, Array

_DATA_TAG = 1
_CONTROL_TAG = 2
_FIRST_TAG = 16
"""The MPI tag that stands for tag 0 of `isend` and `irecv`."""


def as_bytes(data: Array) -> list[object]:
    """Return the buffer `data` as MPI's bytes. MPI has no name for float16, and moving needs none."""
    return [data.view(np.uint8), MPI.BYTE]


@maps_all_errors
class MpiSend:
    """A `Request` for a message that this rank sends.

    Args:
        transport: The transport. It keeps `data` alive if this object is dropped before MPI is done.
        request: The request of MPI.
        data: The flat array that MPI reads.
    """

    source: int | None = None

    def __init__(self, transport: MpiTransport, request: MPI.Request, data: Array) -> None:
        self._transport, self._request, self._data = transport, request, data
        self._over = False

    def __del__(self) -> None:
        if not self._over:
            self._transport.keep(self._request, self._data)

    def test(self) -> bool:
        self._over = self._over or bool(self._request.Test())
        if not self._over:
            self._transport.match()
        return self._over

    def wait(self) -> None:
        wait_until(self.test, self._transport.check)

    def cancel(self) -> bool:
        return False


@maps_all_errors
class MpiReceive:
    """A `Request` for a message that this rank receives.

    MPI is asked for the message only when it is there and its size is known. Open MPI (5.0.11, one host) writes a message that
    is longer than the array behind the array's end, and reports the error afterwards.

    Args:
        transport: The transport. It finds the message, in the order in which the program has asked for messages.
        data: The flat array that MPI writes.
        sender: The rank of the sender, or `ANY`.
        tag: The tag of the message.

    Attributes:
        source: See `Request.source`.
    """

    def __init__(self, transport: MpiTransport, data: Array, sender: int, tag: int) -> None:
        self._transport, self._data, self.sender, self.tag = transport, data, sender, tag
        self._request: MPI.Request | None = None
        self._error: Exception | None = None
        self._over = False
        self.source: int | None = None

    def __del__(self) -> None:
        if not self._over and self._request is not None:
            self._transport.keep(self._request, self._data)

    def begin(self, message: MPI.Message, status: MPI.Status) -> None:
        """Receive a message that is there; into memory of its own, if it has another size than the array."""
        size, self.source = status.Get_count(MPI.BYTE), status.Get_source()
        if size != self._data.nbytes:
            self._error = wrong_size(f"{self._data.nbytes} bytes", self.source, f"{size}")
            self._data = np.empty(size, np.uint8)
        self._request = message.Irecv(as_bytes(self._data))  # the last, for another thread may test this meanwhile

    def test(self) -> bool:
        if self._over:
            return True
        if not self._is_here():
            self._transport.match()
            if not self._is_here():
                return False
        self._over = True
        if self._error is not None:
            self.source = None
            raise self._error
        return True

    def _is_here(self) -> bool:
        return self._request is not None and bool(self._request.Test())

    def wait(self) -> None:
        wait_until(self.test, self._transport.check)

    def cancel(self) -> bool:
        if self._over:
            return False
        if self._transport.forget(self):
            self._over = True
            return True
        self.wait()
        return False


@maps_all_errors
class MpiTransport:
    """A `Transport` on a communicator of MPI.

    Args:
        comm: The communicator, which nobody else uses.
        interrupt: Ends the waits of this transport, and of those that are made of it; None if nothing ever does.
        hosts: For each rank, a number of its host; empty if nobody asks.
    """

    def __init__(self, comm: MPI.Intracomm, interrupt: Interrupt | None = None, hosts: Sequence[int] = ()) -> None:
        self.comm = comm
        self.hosts = hosts
        self._interrupt = interrupt
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._posted: list[MPI.Request] = []
        self._status = MPI.Status()
        # Any thread may add one, whenever it collects garbage.
        self._dropped: deque[tuple[MPI.Request, Array]] = deque()
        self._awaited: list[MpiReceive] = []
        """Receives whose messages have not been found yet, in the order in which the program has asked for them."""
        self._lock = threading.Lock()  # of `_awaited`

    @property
    def medium(self) -> str:
        first = MPI.Get_library_version().replace("\0", "").splitlines()[0].partition(",")[0]
        return " ".join(first.replace("Version:", "").split())

    @property
    def polls(self) -> bool:
        return self._interrupt is not None

    @maps_own_errors
    def check(self) -> None:
        """Raise PeerLeftError if the waits on this transport have been ended."""
        if self._interrupt is not None:
            self._interrupt.check()

    @maps_own_errors
    def call(self, name: str, *args: object) -> None:
        """Call a method of the communicator that waits for other ranks, such as "Barrier", and return when it is done.

        Raises:
            MPI.Exception: MPI has failed. The caller maps it.
            PeerLeftError: The wait has been ended.
        """
        if self._interrupt is None:
            getattr(self.comm, name)(*args)
        else:
            self._interrupt.check()
            self._finish(getattr(self.comm, f"I{name.lower()}")(*args), args)

    def _finish(self, request: MPI.Request, memory: object) -> None:
        try:
            wait_until(request.Test, self.check)
        except PeerLeftError:
            _never_over.append((request, memory))
            raise

    def send(self, data: Array, dest: int) -> None:
        self.call("Send", as_bytes(data), dest, _DATA_TAG)

    def recv(self, data: Array, source: int) -> None:
        self.call("Recv", as_bytes(data), source, _DATA_TAG)

    def sendrecv(self, send: Array, dest: int, recv: Array, source: int) -> None:
        self.call("Sendrecv", as_bytes(send), dest, _DATA_TAG, as_bytes(recv), source, _DATA_TAG)

    def isend(self, data: Array, dest: int, tag: int = 0) -> MpiSend:
        check_message(data, dest, tag, self.size, receives=False)
        self._forget_dropped()
        return MpiSend(self, self.comm.Isend(as_bytes(data), dest, _FIRST_TAG + tag), data)

    def irecv(self, data: Array, source: int = ANY, tag: int = 0) -> MpiReceive:
        check_message(data, source, tag, self.size, receives=True)
        self._forget_dropped()
        receive = MpiReceive(self, data, source, tag)
        with self._lock:
            self._awaited.append(receive)
        return receive

    def match(self) -> None:
        """Begin each receive whose message is there. A message belongs to the first receive that can take it.

        Every test of a message that is not over yet calls this, whichever message that is. MPI sends most messages only when
        their receives have begun, and the program may wait for any message first: the sender of another one may have to end
        that before it does what this rank waits for.
        """
        if not self._awaited:
            return
        with self._lock:
            waiting: list[MpiReceive] = []
            for receive in self._awaited:
                message = None
                if not any(_may_take_the_same(receive, earlier) for earlier in waiting):
                    sender = MPI.ANY_SOURCE if receive.sender == ANY else receive.sender
                    status = MPI.Status()
                    message = self.comm.Improbe(sender, _FIRST_TAG + receive.tag, status)
                if message is None:
                    waiting.append(receive)
                else:
                    receive.begin(message, status)
            self._awaited = waiting

    def forget(self, receive: MpiReceive) -> bool:
        """Give up a receive. Return whether its message was not found yet."""
        with self._lock:
            if receive not in self._awaited:
                return False
            self._awaited.remove(receive)
            return True

    def keep(self, request: MPI.Request, data: Array) -> None:
        """Keep `data` alive until MPI is done with `request`, which nobody awaits any more."""
        self._dropped.append((request, data))

    def _forget_dropped(self) -> None:
        for _ in range(len(self._dropped)):
            try:
                request, data = self._dropped.popleft()
            except IndexError:  # another thread looks too
                return
            if not request.Test():
                self.keep(request, data)

    @maps_own_errors
    def post(self, content: bytes, dest: int) -> None:
        try:
            if self._posted:
                self._posted = [request for request in self._posted if not request.Test()]
            request = self.comm.Isend([content, MPI.BYTE], dest, _CONTROL_TAG)
            if not request.Test():
                self._posted.append(request)  # the request keeps the message's memory until MPI has read it
        except MPI.Exception as error:
            raise in_our_words("post", error) from error

    @maps_own_errors
    def has_message(self) -> bool:
        if self._interrupt is not None and self._interrupt.is_set:  # `poll` raises that
            return True
        try:
            return self.comm.Iprobe(MPI.ANY_SOURCE, _CONTROL_TAG)
        except MPI.Exception:  # `poll` raises it again
            return True

    @maps_own_errors
    def poll(self) -> tuple[int, bytes] | None:
        self.check()
        status = self._status
        try:
            message = self.comm.Improbe(MPI.ANY_SOURCE, _CONTROL_TAG, status)
            if message is None:
                return None
            content = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([content, MPI.BYTE])
            return status.Get_source(), bytes(content)
        except MPI.Exception as error:
            raise in_our_words("poll", error) from error

    def duplicate(self) -> MpiTransport:
        if self._interrupt is None:
            return MpiTransport(self.comm.Dup(), None, self.hosts)
        self._interrupt.check()
        comm, request = self.comm.Idup()
        self._finish(request, comm)
        return MpiTransport(comm, self._interrupt, self.hosts)

    def subgroup(self, ranks: Sequence[int]) -> MpiTransport:
        if len(ranks) == self.size:
            return self.duplicate()
        group = self.comm.Get_group().Incl(list(ranks))
        try:
            hosts = [self.hosts[rank] for rank in ranks] if self.hosts else ()
            return MpiTransport(self.comm.Create_group(group), self._interrupt, hosts)
        finally:
            group.Free()

    def close(self) -> None:
        with self._lock:  # another thread may look for messages
            self._awaited = []
        MPI.Request.Waitall(self._posted)
        _never_over.extend(self._dropped)
        self.comm.Free()


def _may_take_the_same(receive: MpiReceive, other: MpiReceive) -> bool:
    """Return whether some message could be for both receives."""
    return receive.tag == other.tag and (receive.sender == other.sender or ANY in (receive.sender, other.sender))


_never_over: list[tuple[MPI.Request, object]] = []
"""What MPI may still read or write: messages that were never received, or never sent, and calls whose waits were ended."""
