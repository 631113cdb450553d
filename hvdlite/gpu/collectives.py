"""What all ranks of a group do on flat tensors in device memory, and what a rank alone does.

Every rank calls the same, in the same order, with equal arguments. A call puts work on a stream and returns at once (that
through host memory waits). What is launched and never ends, because a rank has left or the network has failed, is ended by
`DeviceCollectives.fail`, which the core's watchdog calls; from then on every call raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.errors import HvdliteError, UnsupportedTensorError
from hvdlite.gpu.nccl import DTYPES
from hvdlite.protocols import Device, ReduceOp, Stream
from hvdlite.tensors.reduction import NCCL_WITH_FLOAT8, reduction


class DeviceCollectives:
    """The collectives of a group on a device. This class is those of a rank alone, for which there is nothing to do.

    Args:
        device: Where the tensors are; one for all.
        rank: This process in the group.
        size: The number of ranks.

    Attributes:
        nccl_version: Which dtypes are reduced here: those of `Reduction.on_device`. What is to be cast, the caller casts.
        direct: Tensors do not pass through host memory.
        stream: A stream for whoever has none of his own.
        launched: How many calls have put work on a stream. Ranks that have done the same have the same number.
    """

    direct = True
    nccl_version = NCCL_WITH_FLOAT8

    def __init__(self, device: Device, rank: int = 0, size: int = 1) -> None:
        self.device, self.rank, self.size = device, rank, size
        self.stream: Stream = device.side()
        self.launched = 0
        self.close_with: Callable[[], None] = lambda: None
        """Called by `close`."""
        self._failure: HvdliteError | None = None

    def allreduce(self, tensor: Any, op: ReduceOp, stream: Stream, out: Any = None) -> None:
        """Reduce a flat tensor over the ranks.

        Args:
            tensor: Shape ``(n,)``, the same on every rank; of a dtype that is reduced without a cast.
            op: SUM, AVERAGE (no integers), MIN or MAX (integers and bool), or PRODUCT. Halves are added in NCCL's way, rounded
                more than once. Averages of halves, and of any numbers where the size is a power of two, are divided before they
                are added.
            stream: Where the work is put.
            out: Where the result goes; into `tensor` by default.

        Raises:
            NcclError: This or an earlier call has failed.
            PeerLeftError: A rank has left the job.
            UnsupportedTensorError: A dtype that is not reduced here.
        """
        if out is not None:
            self._copy(tensor, out, stream)

    def reduce_scatter(self, tensor: Any, out: Any, counts: Sequence[int], op: ReduceOp, stream: Stream) -> None:
        """Reduce a flat tensor over the ranks; rank r keeps slice r, of ``counts[r]`` elements, in `out`. As `allreduce`."""
        self._copy(tensor, out, stream)

    def allgather(self, tensor: Any, out: Any, counts: Sequence[int], stream: Stream) -> None:
        """Concatenate the ranks' flat tensors (``counts[r]`` elements from rank r) in `out`, of any dtype. As `allreduce`."""
        self._copy(tensor, out, stream)

    def broadcast(self, tensor: Any, root: int, stream: Stream) -> None:
        """Overwrite a flat tensor, of any dtype, with rank `root`'s. As `allreduce`."""

    def alltoall(
        self, tensor: Any, send_counts: Sequence[int], out: Any, recv_counts: Sequence[int], stream: Stream
    ) -> None:
        """Give slice r of a flat tensor to rank r; put what comes from rank r in slice r of `out`. As `allgather`."""
        self._copy(tensor, out, stream)

    def _reducible(self, tensor: Any, op: ReduceOp) -> tuple[Any, int]:
        """The tensor as it is reduced, and NCCL's number of its dtype."""
        dtype = self.device.dtype(tensor)
        how = reduction(dtype, op)
        there = how.on_device(self.nccl_version)
        if there is None or how.casts_on_device:
            hint = "it is reduced in host memory only" if there is None else f"cast it to {there}"
            raise UnsupportedTensorError(f"{op!r} of {dtype} is not done on a device: {hint}.")
        return (tensor if there == dtype else self.device.view(tensor, there)), DTYPES[there]

    def group(self) -> contextlib.AbstractContextManager[None]:
        """For a with statement: the calls of this thread inside of it are launched as one, at its end."""
        return contextlib.nullcontext()

    def _copy(self, source: Any, into: Any, stream: Stream) -> None:
        with self.device.on(stream):
            self.device.copy(source, into)

    def check(self) -> None:
        """Raise what has gone wrong since.

        Raises:
            NcclError: What was launched has failed.
            PeerLeftError: A rank has left the job that was needed.
        """
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def fail(self, error: HvdliteError) -> None:
        """End what is under way; from now on every call raises `error`. From any thread."""
        if self._failure is None:
            self._failure = error
            self.abort()

    def look(self) -> None:
        """For the watch: find out whether what was launched has failed, and if so `fail`."""

    def abort(self) -> None:
        """End what is under way on this rank."""

    def close(self) -> None:
        """Release everything. All ranks do this; nothing may be under way."""
        self.close_with()


def on_device(device: Device, call: Callable[[], None]) -> Callable[[], None]:
    """A call that ends a communicator, for a thread of its own, with `device` as that thread's current one.

    A thread that has chosen none has the first, and NCCL makes current again what was before: this would take memory of a GPU
    that is another rank's.
    """

    def run() -> None:
        with device.on(device.current()):
            call()

    return run
