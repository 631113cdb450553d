"""Messages over MPI, through mpi4py. Importing this module starts MPI."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from hvdlite.comm.messages import check_message, wrong_size
from hvdlite.comm.mpi_errors import in_our_words, maps_all_errors, maps_own_errors
from hvdlite.comm.naps import wait_until
from hvdlite.protocols import ANY, Array

_DATA_TAG = 1
_CONTROL_TAG = 2
_FIRST_TAG = 16
"""The MPI tag that stands for tag 0 of `isend` and `irecv`."""


def as_bytes(data: Array) -> list[object]:
    """Return the buffer `data` as MPI's bytes. MPI has no name for float16, and moving needs none."""
    return [data.view(np.uint8), MPI.BYTE]


@maps_all_errors
class MpiRequest:
    """A `Request` on a request of MPI.

    Args:
        transport: The transport. It keeps `data` alive if this object is dropped before MPI is done.
        request: The request of MPI.
        data: The flat array that MPI reads or writes.
        receives: True for a receive, False for a send.

    Attributes:
        source: See `Request.source`.
    """

    def __init__(self, transport: MpiTransport, request: MPI.Request, data: Array, receives: bool) -> None:
        self._transport, self._request, self._data, self._receives = transport, request, data, receives
        self._over = False
        self.source: int | None = None

    def __del__(self) -> None:
        if not self._over:
            self._transport.keep(self._request, self._data)

    def test(self) -> bool:
        if self._over:
            return True
        status = MPI.Status()
        try:
            if not self._request.Test(status):
                return False
        except MPI.Exception as error:
            self._over = True
            if self._receives and error.Get_error_class() == MPI.ERR_TRUNCATE:
                raise wrong_size(f"{self._data.nbytes} bytes", status.Get_source(), "more") from error
            raise
        self._end(status)
        return True

    def _end(self, status: MPI.Status) -> None:
        self._over = True
        if self._receives:
            count, source = status.Get_count(MPI.BYTE), status.Get_source()
            if count != self._data.nbytes:
                raise wrong_size(f"{self._data.nbytes} bytes", source, f"{count}")
            self.source = source

    def wait(self) -> None:
        wait_until(self.test, lambda: None)

    def cancel(self) -> bool:
        if self._over or not self._receives:
            return False
        status = MPI.Status()
        self._request.Cancel()
        self._request.Wait(status)  # MPI promises that this returns after a Cancel
        if status.Is_cancelled():
            self._over = True
            return True
        self._end(status)
        return False


@maps_all_errors
class MpiTransport:
    """A `Transport` on a communicator of MPI."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._posted: list[MPI.Request] = []
        self._status = MPI.Status()
        self._dropped: list[tuple[MPI.Request, Array]] = []

    @property
    def medium(self) -> str:
        first = MPI.Get_library_version().replace("\0", "").splitlines()[0].partition(",")[0]
        return " ".join(first.replace("Version:", "").split())

    def send(self, data: Array, dest: int) -> None:
        self.comm.Send(as_bytes(data), dest, _DATA_TAG)

    def recv(self, data: Array, source: int) -> None:
        self.comm.Recv(as_bytes(data), source, _DATA_TAG)

    def sendrecv(self, send: Array, dest: int, recv: Array, source: int) -> None:
        self.comm.Sendrecv(as_bytes(send), dest, _DATA_TAG, as_bytes(recv), source, _DATA_TAG)

    def isend(self, data: Array, dest: int, tag: int = 0) -> MpiRequest:
        check_message(data, dest, tag, self.size, receives=False)
        self._forget_dropped()
        return MpiRequest(self, self.comm.Isend(as_bytes(data), dest, _FIRST_TAG + tag), data, receives=False)

    def irecv(self, data: Array, source: int = ANY, tag: int = 0) -> MpiRequest:
        check_message(data, source, tag, self.size, receives=True)
        self._forget_dropped()
        sender = MPI.ANY_SOURCE if source == ANY else source
        return MpiRequest(self, self.comm.Irecv(as_bytes(data), sender, _FIRST_TAG + tag), data, receives=True)

    def keep(self, request: MPI.Request, data: Array) -> None:
        """Keep `data` alive until MPI is done with `request`, which nobody awaits any more."""
        self._dropped.append((request, data))

    def _forget_dropped(self) -> None:
        if self._dropped:
            self._dropped = [each for each in self._dropped if not each[0].Test()]

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
    def poll(self) -> tuple[int, bytes] | None:
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
        return MpiTransport(self.comm.Dup())

    def subgroup(self, ranks: Sequence[int]) -> MpiTransport:
        group = self.comm.Get_group().Incl(list(ranks))
        try:
            return MpiTransport(self.comm.Create_group(group))
        finally:
            group.Free()

    def close(self) -> None:
        MPI.Request.Waitall(self._posted)
        _never_over.extend(self._dropped)
        self.comm.Free()


_never_over: list[tuple[MPI.Request, Array]] = []
"""Memory that MPI may still read or write after a transport was closed: messages that were never received, or never sent."""
