"""Collectives on a device by NCCL."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hvdlite.algorithms.slices import slices
from hvdlite.comm.gpu.abandonable import AbandonableCall
from hvdlite.comm.gpu.collectives import DeviceCollectives, on_device
from hvdlite.comm.gpu.nccl import DTYPES, OPS, DeviceCommunicator
from hvdlite.errors import NcclError
from hvdlite.protocols import Device, ReduceOp, Stream

_GOODBYE_SECONDS = 10.0
"""How long `NcclCollectives.close` waits, in seconds. A communicator in a CUDA graph ends only when the graph is gone."""


class NcclCollectives(DeviceCollectives):
    """`DeviceCollectives` by NCCL.

    Args:
        device, rank, size: See `DeviceCollectives`.
        communicator: This rank's communicator, for this object alone.
        version: The version of NCCL as its number, such as 22809 for 2.28.9.
    """

    def __init__(self, device: Device, rank: int, size: int, communicator: DeviceCommunicator, version: int) -> None:
        super().__init__(device, rank, size)
        self._communicator = communicator
        self.nccl_version = version

    @contextlib.contextmanager
    def _launch(self, operation: str) -> Iterator[DeviceCommunicator]:
        self.check()
        self.launched += 1
        try:
            yield self._communicator
        except NcclError as error:
            self.check()  # raises an earlier error, which has ended this call too
            raise NcclError(f"rank {self.rank}, {operation} on {self._where()}: {error}") from None

    def _where(self) -> str:
        return f"{self.device.kind}:{self.device.index}"

    def _averaging(self, op: ReduceOp) -> tuple[int, bool]:
        """Return NCCL's number of the op to call, and whether the caller has to divide its result by the number of ranks."""
        if op is not ReduceOp.AVERAGE:
            return OPS[op], False
        # NCCL's average multiplies by 1/n first, which is exact for powers of two. Else 1/n is rounded to the dtype before.
        early = self.size & (self.size - 1) == 0
        return (OPS[op], False) if early else (OPS[ReduceOp.SUM], True)

    def _divide(self, tensor: Any, stream: Stream) -> None:
        with self.device.on(stream):
            self.device.divide(tensor, self.size)

    def allreduce(self, tensor: Any, op: ReduceOp, stream: Stream, out: Any = None) -> None:
        out = tensor if out is None else out
        number, divides = self._averaging(op)
        send, dtype = self._reducible(tensor, op)
        recv, _ = self._reducible(out, op)
        at = self.device.pointer
        with self._launch("allreduce") as nccl:
            nccl.all_reduce(at(send), at(recv), self.device.count(send), dtype, number, stream.handle)
        if divides:
            self._divide(out, stream)

    def reduce_scatter(self, tensor: Any, out: Any, counts: Sequence[int], op: ReduceOp, stream: Stream) -> None:
        number, divides = self._averaging(op)
        send, dtype = self._reducible(tensor, op)
        recv, _ = self._reducible(out, op)
        each = self.device.count(send) // max(1, self.device.count(tensor))  # 2 for complex numbers
        sizes = [count * each for count in counts]
        at = self.device.pointer
        with self._launch("reduce_scatter") as nccl:
            if len(set(sizes)) == 1:
                nccl.reduce_scatter(at(send), at(recv), sizes[0], dtype, number, stream.handle)
            else:
                with nccl.group():
                    for owner, piece in enumerate(slices(sizes)):
                        if sizes[owner]:
                            nccl.reduce(at(send[piece]), at(recv), sizes[owner], dtype, number, owner, stream.handle)
        if divides:
            self._divide(out, stream)

    # The following operations move values without arithmetic, so they send bytes, whatever the dtype is.

    def _bytes(self, tensor: Any) -> Any:
        return self.device.view(tensor, "uint8")

    def allgather(self, tensor: Any, out: Any, counts: Sequence[int], stream: Stream) -> None:
        send, recv = self._bytes(tensor), self._bytes(out)
        sizes = _in_bytes(counts, self.device.count(recv))
        at, byte = self.device.pointer, DTYPES["uint8"]
        with self._launch("allgather") as nccl:
            if len(set(sizes)) == 1:
                nccl.all_gather(at(send), at(recv), sizes[0], byte, stream.handle)
            else:
                with nccl.group():
                    for root, piece in enumerate(slices(sizes)):
                        if sizes[root]:
                            nccl.broadcast(at(send), at(recv[piece]), sizes[root], byte, root, stream.handle)

    def broadcast(self, tensor: Any, root: int, stream: Stream) -> None:
        data = self._bytes(tensor)
        where, byte = self.device.pointer(data), DTYPES["uint8"]
        with self._launch("broadcast") as nccl:
            nccl.broadcast(where, where, self.device.count(data), byte, root, stream.handle)

    def alltoall(
        self, tensor: Any, send_counts: Sequence[int], out: Any, recv_counts: Sequence[int], stream: Stream
    ) -> None:
        send, recv = self._bytes(tensor), self._bytes(out)
        item = max(self.device.count(send), self.device.count(recv)) // max(1, sum(send_counts), sum(recv_counts))
        at, byte = self.device.pointer, DTYPES["uint8"]
        outgoing = slices([count * item for count in send_counts])
        incoming = slices([count * item for count in recv_counts])
        with self._launch("alltoall") as nccl, nccl.group():
            for peer in range(self.size):
                if send_counts[peer]:
                    nccl.send(at(send[outgoing[peer]]), send_counts[peer] * item, byte, peer, stream.handle)
                if recv_counts[peer]:
                    nccl.recv(at(recv[incoming[peer]]), recv_counts[peer] * item, byte, peer, stream.handle)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        with self._launch("a group of calls") as nccl, nccl.group():
            yield

    def look(self) -> None:
        if self._failure is None and (text := self._communicator.error()) is not None:
            self.fail(NcclError(f"rank {self.rank}: what was launched on {self._where()} has failed: {text}"))

    def abort(self) -> None:
        if self._failure is None:
            self._failure = NcclError(f"rank {self.rank}: the collectives on {self._where()} were given up.")
        self._end(self._communicator.abort, "hvdlite-nccl-abort")  # not awaited: the watchdog has others to look after

    def close(self) -> None:
        super().close()
        if self._failure is None:
            leaving = self._end(self._communicator.destroy, "hvdlite-nccl-destroy")
            if leaving.is_over(_GOODBYE_SECONDS):
                leaving.result()

    def _end(self, call: Callable[[], None], name: str) -> AbandonableCall[None]:
        return AbandonableCall(on_device(self.device, call), name)


def _in_bytes(counts: Sequence[int], nbytes: int) -> list[int]:
    item = nbytes // max(1, sum(counts))
    return [count * item for count in counts]
