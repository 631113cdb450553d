"""Collectives of a group on flat tensors in device memory: by NCCL, or through host memory, or of a rank alone.

Every rank calls the same, in the same order, with equal arguments. A call puts work on a stream and returns at once (that
through host memory waits). What is launched and never ends, because a rank has left or the network has failed, is ended by
`DeviceCollectives.fail`, which the core's watch calls; from then on every call raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvdlite.algorithms.slices import slices
from hvdlite.comm.nccl import DTYPES, FLOAT8_SINCE, OPS, Communicator
from hvdlite.comm.patience import Attempt
from hvdlite.errors import HvdliteError, NcclError, UnsupportedTensorError
from hvdlite.protocols import Array, Device, Finish, ReduceOp, Stream
from hvdlite.tensors import HALF_DTYPES

_GOODBYE_SECONDS = 10.0
"""How long the end of a communicator may take. One that is part of a CUDA graph waits until that is gone."""


class HostPlane(Protocol):
    """What the ranks of the group speak by otherwise: `hvdlite.comm.hierarchical.HierarchicalCollectives`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allreduce(
        self,
        data: Array,
        op: ReduceOp,
        algorithm: str = "auto",
        dtype: str | None = None,
        finish: Finish | None = None,
    ) -> None: ...

    def allgather(self, data: Array, out: Array, counts: Sequence[int]) -> None: ...

    def broadcast(self, data: Array, root: int) -> None: ...

    def alltoall(self, data: Array, send_counts: Sequence[int], out: Array, recv_counts: Sequence[int]) -> None: ...

    def reduce_scatter(self, data: Array, out: Array, counts: Sequence[int], op: ReduceOp) -> None: ...


class Wire(NamedTuple):
    """How values of a dtype are reduced on the device.

    Attributes:
        dtype: As elements of this dtype.
        cast: They are cast to it, and back; if not, the dtype is the same, or the same bytes are seen as it.
    """

    dtype: str
    cast: bool


def wire_of(dtype: str, op: ReduceOp, version: int) -> Wire | None:
    """How NCCL reduces a dtype, or None if it does not.

    Complex numbers are added as pairs of real ones. 16-bit integers travel as 32 bits, and wrap around as ever when they are
    cast back. For bool, Min, Max and Product of bytes that are 0 or 1 are "all", "any" and "all". Averages of integers are
    summed in 64 bits, as on the host. Min and Max of floating-point numbers go by way of the host: NCCL's lose a NaN, as CUDA's
    fmin and fmax do.

    Args:
        dtype: A name as in `hvdlite.protocols.Device`.
        op: The reduction; of bool no Sum or Average, of complex numbers no Min or Max.
        version: NCCL's.
    """
    if op is ReduceOp.ADASUM or (op is ReduceOp.PRODUCT and dtype.startswith("complex")):
        return None
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.startswith(("float", "bfloat")):
        return None
    if dtype.startswith("complex"):
        return Wire("float32" if dtype == "complex64" else "float64", False)
    if dtype.startswith("float8"):
        return Wire(dtype, False) if version >= FLOAT8_SINCE else None
    if op is ReduceOp.AVERAGE and dtype.startswith(("int", "uint")):
        return None if dtype == "uint64" else Wire("int64", True)
    if dtype == "bool":
        return Wire("uint8", False)
    if dtype in ("int16", "uint16"):
        return Wire("int32", True)
    return Wire(dtype, False)


class DeviceCollectives:
    """The collectives of a group on a device. This class is those of a rank alone, for which there is nothing to do.

    Args:
        device: Where the tensors are; one for all.
        rank: This process in the group.
        size: The number of ranks.

    Attributes:
        direct: Tensors do not pass through host memory.
        stream: A stream for whoever has none of his own.
        launched: How many calls have put work on a stream. Ranks that have done the same have the same number.
    """

    direct = True

    def __init__(self, device: Device, rank: int = 0, size: int = 1) -> None:
        self.device, self.rank, self.size = device, rank, size
        self.stream: Stream = device.side()
        self.launched = 0
        self.close_with: Callable[[], None] = lambda: None
        """Called by `close`."""
        self._failure: HvdliteError | None = None

    def wire(self, dtype: str, op: ReduceOp) -> Wire | None:
        """How `allreduce` and `reduce_scatter` take a dtype. What is to be cast, the caller casts.

        Returns:
            None if they do not take it at all.
        """
        return wire_of(dtype, op, FLOAT8_SINCE)

    def allreduce(self, tensor: Any, op: ReduceOp, stream: Stream, out: Any = None) -> None:
        """Reduce a flat tensor over the ranks.

        Args:
            tensor: Shape ``(n,)``, the same on every rank; of a dtype that `wire` does not want cast.
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
        wire = self.wire(dtype, op)
        if wire is None or wire.cast:
            hint = f"cast it to {wire.dtype}" if wire is not None else "it is reduced in host memory only"
            raise UnsupportedTensorError(f"{op!r} of {dtype} is not done on a device: {hint}.")
        return (tensor if wire.dtype == dtype else self.device.view(tensor, wire.dtype)), DTYPES[wire.dtype]

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


class NcclCollectives(DeviceCollectives):
    """By NCCL.

    Args:
        device, rank, size: As for `DeviceCollectives`.
        communicator: This rank's end, for this object alone.
        version: NCCL's.
    """

    def __init__(self, device: Device, rank: int, size: int, communicator: Communicator, version: int) -> None:
        super().__init__(device, rank, size)
        self._communicator = communicator
        self._version = version

    def wire(self, dtype: str, op: ReduceOp) -> Wire | None:
        return wire_of(dtype, op, self._version)

    @contextlib.contextmanager
    def _launch(self, operation: str) -> Iterator[Communicator]:
        self.check()
        self.launched += 1
        try:
            yield self._communicator
        except NcclError as error:
            self.check()  # what went wrong before, and ended this call too
            raise NcclError(f"rank {self.rank}, {operation} on {self._where()}: {error}") from None

    def _where(self) -> str:
        return f"{self.device.kind}:{self.device.index}"

    def _averaging(self, tensor: Any, op: ReduceOp) -> tuple[int, bool]:
        """NCCL's number of `op`, and whether a division is left to do."""
        if op is not ReduceOp.AVERAGE:
            return OPS[op], False
        # Its average multiplies by 1/n first: exact for powers of two, and halves do not overflow.
        early = self.device.dtype(tensor) in HALF_DTYPES or self.size & (self.size - 1) == 0
        return (OPS[op], False) if early else (OPS[ReduceOp.SUM], True)

    def _divide(self, tensor: Any, stream: Stream) -> None:
        with self.device.on(stream):
            self.device.divide(tensor, self.size)

    def allreduce(self, tensor: Any, op: ReduceOp, stream: Stream, out: Any = None) -> None:
        out = tensor if out is None else out
        number, divides = self._averaging(tensor, op)
        send, dtype = self._reducible(tensor, op)
        recv, _ = self._reducible(out, op)
        at = self.device.pointer
        with self._launch("allreduce") as nccl:
            nccl.all_reduce(at(send), at(recv), self.device.count(send), dtype, number, stream.handle)
        if divides:
            self._divide(out, stream)

    def reduce_scatter(self, tensor: Any, out: Any, counts: Sequence[int], op: ReduceOp, stream: Stream) -> None:
        number, divides = self._averaging(tensor, op)
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

    # What only moves goes as bytes, whatever it is.

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
        self._end(self._communicator.abort, "hvdlite-nccl-abort")  # in its own time: the watch has others to look after

    def close(self) -> None:
        super().close()
        if self._failure is None:
            leaving = self._end(self._communicator.destroy, "hvdlite-nccl-destroy")
            if leaving.is_over(_GOODBYE_SECONDS):
                leaving.result()

    def _end(self, call: Callable[[], None], name: str) -> Attempt[None]:
        return Attempt(on_device(self.device, call), name)


def on_device(device: Device, call: Callable[[], None]) -> Callable[[], None]:
    """A call that ends a communicator, for a thread of its own, with `device` as that thread's current one.

    A thread that has chosen none has the first, and NCCL makes current again what was before: this would take memory of a GPU
    that is another rank's.
    """

    def run() -> None:
        with device.on(device.current()):
            call()

    return run


def _in_bytes(counts: Sequence[int], nbytes: int) -> list[int]:
    item = nbytes // max(1, sum(counts))
    return [count * item for count in counts]


class StagedCollectives(DeviceCollectives):
    """Through (pinned) host memory, and the host's own collectives. Calls wait for `stream` and for the other ranks.

    Args:
        device: As for `DeviceCollectives`.
        host: The group; for this object alone.
    """

    direct = False

    def __init__(self, device: Device, host: HostPlane) -> None:
        super().__init__(device, host.rank, host.size)
        self._host = host

    def wire(self, dtype: str, op: ReduceOp) -> Wire | None:
        return wire_of(dtype, op, FLOAT8_SINCE - 1)

    def allreduce(self, tensor: Any, op: ReduceOp, stream: Stream, out: Any = None) -> None:
        self.launched += 1
        with self.device.on(stream):
            send, _ = self._reducible(tensor, op)
            recv, _ = self._reducible(tensor if out is None else out, op)
            array = self.device.to_host(send)
            finish = None
            if op is ReduceOp.AVERAGE:
                op, finish = ReduceOp.SUM, self._divided
            self._host.allreduce(array, op, dtype=self.device.dtype(send), finish=finish)
            self.device.from_host(array, recv)

    def _divided(self, array: Array) -> None:
        np.divide(array, self.size, out=array)

    def reduce_scatter(self, tensor: Any, out: Any, counts: Sequence[int], op: ReduceOp, stream: Stream) -> None:
        # By an allreduce, which accumulates halves as float32.
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
