"""Collectives on device memory by an MPI library that takes it (``HVDLITE_MPI_GPU=1``), such as Open MPI built with CUDA."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from hvdlite.gpu.collectives import HostPlane
from hvdlite.gpu.staged import StagedCollectives
from hvdlite.protocols import Device, ReduceOp, Stream
from hvdlite.tensors.numpy_adapter import HALF_DTYPES

_TYPES = {
    **{"int8": "|i1", "uint8": "|u1", "int32": "<i4", "uint32": "<u4", "int64": "<i8", "uint64": "<u8"},
    **{"float32": "<f4", "float64": "<f8"},
}
"""The array interface's names of dtypes."""


class Memory:
    """Device memory as an array that mpi4py and `hvdlite.comm.mpi` take.

    Args:
        address: Of the first element.
        size: Elements.
        dtype: A name in `_TYPES`.
    """

    def __init__(self, address: int, size: int, dtype: str) -> None:
        self.size, self.itemsize = size, int(_TYPES[dtype][2:])
        self._address, self._dtype = address, dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.size,), "typestr": _TYPES[self._dtype], "data": (self._address, False)}

    def view(self, _: Any) -> Memory:
        """As bytes."""
        return Memory(self._address, self.size * self.itemsize, "uint8")

    def __getitem__(self, piece: slice) -> Memory:
        start, stop, _ = piece.indices(self.size)
        return Memory(self._address + start * self.itemsize, stop - start, self._dtype)


class Flat(Protocol):
    """A `HostPlane` that has MPI under it."""

    @property
    def flat(self) -> Any: ...


def why_no_device_mpi(host: HostPlane) -> str:
    """Why MPI cannot be given device memory; empty if it can."""
    flat = getattr(host, "flat", None)
    if type(flat).__name__ != "MpiCollectives":
        return "the ranks of this job do not speak by MPI."
    mpi = sys.modules["mpi4py.MPI"]
    try:
        ask = ctypes.CDLL(mpi.__file__).MPIX_Query_cuda_support
    except AttributeError:
        return f"{_library(mpi)} does not say whether it takes device memory (MPIX_Query_cuda_support). Use NCCL."
    if not ask():
        return (
            f"{_library(mpi)} was built without CUDA. Use one that has it (ompi_info --parsable | grep cuda), or NCCL."
        )
    return ""


def _library(mpi: Any) -> str:
    return str(mpi.Get_library_version()).partition("\n")[0].strip("\0 ")


class MpiDeviceCollectives(StagedCollectives):
    """By MPI on device memory. Calls wait for `stream` first, which MPI does not know, and for the other ranks.

    Halves, which MPI does not know either, and what is reduced and kept in parts, go through host memory.
    """

    direct = True

    def __init__(self, device: Device, host: HostPlane) -> None:
        super().__init__(device, host)
        self._flat: Any = host.flat  # type: ignore[attr-defined]

    def _memory(self, tensor: Any) -> Memory:
        return Memory(self.device.pointer(tensor), self.device.count(tensor), self.device.dtype(tensor))

    def _bytes(self, tensor: Any) -> Memory:
        return self._memory(self.device.view(tensor, "uint8"))

    def allreduce(self, tensor: Any, op: ReduceOp, stream: Stream, out: Any = None) -> None:
        if self.device.dtype(tensor) in HALF_DTYPES:
            super().allreduce(tensor, op, stream, out)
            return
        if out is not None:
            self._copy(tensor, out, stream)
            tensor = out
        self.launched += 1
        data, _ = self._reducible(tensor, op)
        stream.synchronize()
        self._flat.allreduce(self._memory(data), ReduceOp.SUM if op is ReduceOp.AVERAGE else op)
        if op is ReduceOp.AVERAGE:
            with self.device.on(stream):
                self.device.divide(tensor, self.size)

    def allgather(self, tensor: Any, out: Any, counts: Sequence[int], stream: Stream) -> None:
        self.launched += 1
        recv = self._bytes(out)
        item = recv.size // max(1, sum(counts))
        stream.synchronize()
        self._flat.allgather(self._bytes(tensor), recv, [count * item for count in counts])

    def broadcast(self, tensor: Any, root: int, stream: Stream) -> None:
        self.launched += 1
        stream.synchronize()
        self._flat.broadcast(self._bytes(tensor), root)

    def alltoall(
        self, tensor: Any, send_counts: Sequence[int], out: Any, recv_counts: Sequence[int], stream: Stream
    ) -> None:
        self.launched += 1
        send, recv = self._bytes(tensor), self._bytes(out)
        item = max(send.size, recv.size) // max(1, sum(send_counts), sum(recv_counts))
        stream.synchronize()
        self._flat.alltoall(send, [n * item for n in send_counts], recv, [n * item for n in recv_counts])
