"""Messages over MPI, through mpi4py. Importing this module starts MPI."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from hvdlite.comm.mpi_errors import all_told
from hvdlite.protocols import Array

_DATA_TAG = 1
_LETTER_TAG = 2


def as_bytes(data: Array) -> list[object]:
    """A buffer that MPI moves as bytes: it has no name for float16, and needs none to move it."""
    return [data.view(np.uint8), MPI.BYTE]


@all_told
class MpiTransport:
    """A communicator as a Transport."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._posted: list[MPI.Request] = []
        self._status = MPI.Status()

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

    def post(self, letter: bytes, dest: int) -> None:
        if self._posted:
            self._posted = [request for request in self._posted if not request.Test()]
        request = self.comm.Isend([letter, MPI.BYTE], dest, _LETTER_TAG)
        if not request.Test():
            self._posted.append(request)  # holds the letter's memory until MPI has read it

    def poll(self) -> tuple[int, bytes] | None:
        status = self._status
        message = self.comm.Improbe(MPI.ANY_SOURCE, _LETTER_TAG, status)
        if message is None:
            return None
        letter = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([letter, MPI.BYTE])
        return status.Get_source(), bytes(letter)

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
        self.comm.Free()
