"""Collectives on flat tensors in device memory: their contract, and the case of one rank.

Every rank makes the same calls, in the same order, with equal arguments. A call puts work on a stream and returns at once;
only calls through host memory wait. Launched work may never end, because a rank has left or the network has failed. Then the
watchdog calls `DeviceCollectives.fail`, which ends the work; from then on every call raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.comm.gpu.nccl import DTYPES
from hvdlite.errors import HvdliteError, UnsupportedTensorError
from hvdlite.protocols import Device, ReduceOp, Stream
from hvdlite.tensors.reduction import NCCL_WITH_FLOAT8, reduction


class DeviceCollectives:
    """The collectives of a group on a device. This base class is complete for a group of one rank: it only copies.

    Args:
        device: The device of all tensors.
        rank: The rank of this process in the group.
        size: The number of ranks.

    Attributes:
        nccl_version: The version for `Reduction.on_device`, which says the dtypes that are reduced here. The caller makes the
            casts.
        direct: True if tensors do not pass through host memory.
        stream: A stream for callers that have no stream of their own.
        launched: The number of calls that have put work on a stream. It is equal on ranks that have made the same calls.
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
        self._reduced_as: dict[tuple[str, ReduceOp], str] = {}

    def allreduce(self, tensor: Any, op: ReduceOp, stream: Stream, out: Any = None) -> None:
        """Reduce a flat tensor over the ranks.

        Args:
            tensor: A tensor of shape ``(n,)``, the same shape on every rank, of a dtype that is reduced without a cast.
            op: SUM, AVERAGE (not for integers), MIN or MAX (integers and bool only), or PRODUCT. NCCL adds float16
                and bfloat16 and may round more than once. AVERAGE divides before it adds if the number of ranks is a power of
                two.
            stream: The stream for the work.
            out: The tensor for the result; None for `tensor`.

        Raises:
            NcclError: This or an earlier call has failed.
            PeerLeftError: A rank has left the job.
            UnsupportedTensorError: The dtype cannot be reduced here.
        """
        if out is not None:
            self._copy(tensor, out, stream)

    def reduce_scatter(self, tensor: Any, out: Any, counts: Sequence[int], op: ReduceOp, stream: Stream) -> None:
        """Reduce a flat tensor over the ranks, and put slice r (``counts[r]`` elements) in `out` on rank r.

        See `allreduce` for dtypes and errors.
        """
        self._copy(tensor, out, stream)

    def allgather(self, tensor: Any, out: Any, counts: Sequence[int], stream: Stream) -> None:
        """Concatenate the ranks' flat tensors (``counts[r]`` elements from rank r) in `out`. Any dtype; errors: `allreduce`."""
        self._copy(tensor, out, stream)

    def broadcast(self, tensor: Any, root: int, stream: Stream) -> None:
        """Overwrite a flat tensor of any dtype with the tensor of rank `root`. See `allreduce` for the errors."""

    def alltoall(
        self, tensor: Any, send_counts: Sequence[int], out: Any, recv_counts: Sequence[int], stream: Stream
    ) -> None:
        """Send slice r of a flat tensor to rank r, and put the slice that comes from rank r in slice r of `out`.

        The dtype may be any. See `allreduce` for the errors.
        """
        self._copy(tensor, out, stream)

    def _reducible(self, tensor: Any, op: ReduceOp) -> tuple[Any, int]:
        """Return the tensor as NCCL reduces it (perhaps seen as another dtype), and NCCL's number of that dtype."""
        dtype = self.device.dtype(tensor)
        there = self._reduced_as.get((dtype, op))
        if there is None:
            how = reduction(dtype, op)
            there = how.on_device(self.nccl_version)
            if there is None or how.casts_on_device:
                hint = "it is reduced in host memory only" if there is None else f"cast it to {there}"
                raise UnsupportedTensorError(f"{op!r} of {dtype} is not done on a device: {hint}.")
            self._reduced_as[dtype, op] = there
        return (tensor if there == dtype else self.device.view(tensor, there)), DTYPES[there]

    def group(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager. The calls that this thread makes inside of it are launched as one, at its end."""
        return contextlib.nullcontext()

    def _copy(self, source: Any, into: Any, stream: Stream) -> None:
        with self.device.on(stream):
            self.device.copy(source, into)

    def check(self) -> None:
        """Raise the error of launched work, if there is one.

        Raises:
            NcclError: Launched work has failed.
            PeerLeftError: A rank has left the job, and launched work needs this rank.
        """
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def fail(self, error: HvdliteError) -> None:
        """End all launched work. From now on every call raises `error`. Any thread may call this."""
        if self._failure is None:
            self._failure = error
            self.abort()

    def look(self) -> None:
        """Call `fail` if launched work has failed. The watchdog calls this."""

    def abort(self) -> None:
        """End all launched work on this rank."""

    def close(self) -> None:
        """Release everything. All ranks call this, when no work is under way."""
        self.close_with()


def on_device(device: Device, call: Callable[[], None]) -> Callable[[], None]:
    """Return `call` as a function that makes `device` current in its thread first.

    Threads that end a communicator need this. In a new thread the first GPU is current, and NCCL restores the device that was
    current before: that would allocate memory on a GPU that belongs to another rank.
    """

    def run() -> None:
        with device.on(device.current()):
            call()

    return run
