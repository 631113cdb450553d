"""Collectives on a device through host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.algorithms.slices import slices
from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.protocols import Device, ReduceOp, Stream
from hvdlite.tensors.reduction import NCCL_WITH_FLOAT8, reduction


class StagedCollectives(DeviceCollectives):
    """`DeviceCollectives` through pinned host memory and collectives of the host. Calls wait for `stream` and the other ranks.

    Args:
        device: See `DeviceCollectives`.
        host: The collectives of the group on host memory. No other thread may use them during a call.
    """

    direct = False
    nccl_version = NCCL_WITH_FLOAT8 - 1  # NumPy has no 8-bit floating-point numbers

    def __init__(self, device: Device, host: HierarchicalCollectives) -> None:
        super().__init__(device, host.rank, host.size)
        self._host = host

    def allreduce(self, tensor: Any, op: ReduceOp, stream: Stream, out: Any = None) -> None:
        self.launched += 1
        with self.device.on(stream):
            send, _ = self._reducible(tensor, op)
            recv, _ = self._reducible(tensor if out is None else out, op)
            array = self.device.to_host(send)
            self._host.allreduce(array, reduction(self.device.dtype(send), op, size=self.size))
            self.device.from_host(array, recv)

    def reduce_scatter(self, tensor: Any, out: Any, counts: Sequence[int], op: ReduceOp, stream: Stream) -> None:
        # An allreduce accumulates float16 and bfloat16 in float32; the reduce_scatter of the host does not.
        with self.device.on(stream):
            whole = self.device.cast(tensor, self.device.dtype(tensor))
        self.allreduce(whole, op, stream)
        with self.device.on(stream):
            self.device.copy(whole[slices(counts)[self.rank]], out)

    def allgather(self, tensor: Any, out: Any, counts: Sequence[int], stream: Stream) -> None:
        self.launched += 1
        with self.device.on(stream):
            array = self.device.to_host(tensor)
            gathered = np.empty(self.device.count(out), array.dtype)
            self._host.allgather(array, gathered, counts)
            self.device.from_host(gathered, out)

    def broadcast(self, tensor: Any, root: int, stream: Stream) -> None:
        self.launched += 1
        with self.device.on(stream):
            array = self.device.to_host(tensor)
            self._host.broadcast(array, root)
            self.device.from_host(array, tensor)

    def alltoall(
        self, tensor: Any, send_counts: Sequence[int], out: Any, recv_counts: Sequence[int], stream: Stream
    ) -> None:
        self.launched += 1
        with self.device.on(stream):
            array = self.device.to_host(tensor)
            received = np.empty(self.device.count(out), array.dtype)
            self._host.alltoall(array, send_counts, received, recv_counts)
            self.device.from_host(received, out)
