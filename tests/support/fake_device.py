"""A stand-in for a GPU: CPU tensors, and streams that only record the order of work.

    with fake_gpu() as gpu:           # on every rank; CPU tensors of torch now count as tensors on a GPU
        x = gpu.ready(torch.ones(3))   # the current stream makes the values of x
        y = hvd.allreduce(x)
        gpu.use(y)                     # the current stream reads y: an error if the stream does not wait for the writer of y

Work is done at once, so values are always right. The stand-in checks that the values would be right on a GPU, too. Every stream
has a vector clock: how much work of each stream comes before its next work. The stand-in remembers which streams last wrote and
read the memory. A stream that reads memory must come after the last writer, and a stream that writes must also come after the
last readers. Memory also belongs to the stream on which it was made: another stream that uses the memory needs `keep`
(``record_stream``).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

import hvdlite.api
from hvdlite.comm.gpu.nccl import Library
from hvdlite_torch.tensors import device as torch_device
from hvdlite_torch.tensors.device import TorchDevice
from tests.support.fake_nccl import FakeNccl


class Clock(dict[int, int]):
    """An event: the amount of work of each stream that precedes the event. Work is done at once, so the event has happened."""

    def query(self) -> bool:
        return True


_handles = itertools.count(1)


class FakeStream:
    """A `hvdlite.protocols.Stream`: a vector clock."""

    def __init__(self, device: FakeDevice) -> None:
        self.handle = next(_handles)
        self.device = device
        self.known = Clock({self.handle: 0})
        device.streams[self.handle] = self

    def tick(self) -> Clock:
        """Put a piece of work on the stream. Return the clock of the stream after this work."""
        self.known[self.handle] += 1
        return Clock(self.known)

    def record(self) -> Clock:
        return Clock(self.known)

    def wait(self, event: Clock) -> None:
        for stream, time in event.items():
            self.known[stream] = max(time, self.known.get(stream, 0))

    def synchronize(self) -> None:
        self.device.host_waits += 1


class Misuse(AssertionError):
    """An access to memory that would be a race on a GPU."""


class FakeDevice(TorchDevice):
    """A GPU whose memory is CPU tensors.

    Attributes:
        host_waits: The number of times that the host has waited for a stream.
        capacity: The most bytes that one tensor may have; None for no limit.
    """

    pinned = False

    def __init__(self, index: int, visible: int = 8) -> None:
        super().__init__(torch.device("cpu"))
        self.index = index
        self.count_visible = visible
        self.uuid = f"fake-{index}"
        self.streams: dict[int, FakeStream] = {}
        self.host_waits = 0
        self.capacity: int | None = None
        self._default = FakeStream(self)
        self._current: ContextVar[FakeStream] = ContextVar("current")
        self._lock = threading.Lock()
        self._writes: dict[int, tuple[int, FakeStream, Clock]] = {}  # address -> (end, stream, clock)
        self._reads: dict[int, list[tuple[int, FakeStream, Clock]]] = {}
        self._owners: dict[int, tuple[int, int]] = {}  # address -> (end, stream) of memory that was made
        self._uses: list[tuple[int, int]] = []  # (address, stream) of each use that needs `keep`
        self._kept: list[tuple[int, int, int]] = []  # (address, end, stream)
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._freed: deque[tuple[int, int]] = deque()  # (address, bytes) of memory that was freed

    @property
    def identity(self) -> str:  # type: ignore[override]
        return self.uuid

    @property
    def visible(self) -> int:
        return self.count_visible

    def current(self) -> FakeStream:  # type: ignore[override]
        return self._current.get(self._default)

    def side(self) -> FakeStream:  # type: ignore[override]
        return FakeStream(self)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        token = self._current.set(stream)
        try:
            with torch.no_grad():
                yield
        finally:
            self._current.reset(token)

    # Records of the accesses to memory

    def touch(self, kind: str, address: int, nbytes: int, stream: int) -> None:
        """Record that a stream reads or writes memory.

        Raises:
            Misuse: The access does not come after the last writes, or a write does not come after the last reads.
        """
        if not nbytes:
            return
        while self._freed:
            self._forget(*self._freed.popleft())
        with self._lock:
            mine = self.streams[stream]
            end = address + nbytes
            for begin, (stop, other, when) in list(self._writes.items()):
                if begin < end and address < stop:
                    self._check_order(kind, mine, other, when, "written")
            if kind == "write":
                for begin, readers in list(self._reads.items()):
                    for stop, other, when in readers:
                        if begin < end and address < stop:
                            self._check_order(kind, mine, other, when, "read")
            now = mine.tick()
            if kind == "write":
                self._writes = {
                    begin: entry for begin, entry in self._writes.items() if not (address <= begin and entry[0] <= end)
                }
                self._writes[address] = (end, mine, now)
                self._reads = {
                    begin: [entry for entry in readers if not (address <= begin and entry[0] <= end)]
                    for begin, readers in self._reads.items()
                }
            else:
                self._reads.setdefault(address, []).append((end, mine, now))
            owner = next((own for begin, (stop, own) in self._owners.items() if begin <= address < stop), None)
            if owner is not None and owner != stream:
                self._uses.append((address, stream))

    def _check_order(self, kind: str, mine: FakeStream, other: FakeStream, when: Clock, done: str) -> None:
        if other is not mine and mine.known.get(other.handle, 0) < when[other.handle]:
            raise Misuse(f"stream {mine.handle} would {kind} memory before stream {other.handle} has {done} it")

    def _tensor(self, kind: str, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self._see(tensor)
            storage = tensor.untyped_storage()
            if tensor.is_contiguous():
                self.touch(kind, tensor.data_ptr(), tensor.numel() * tensor.element_size(), self.current().handle)
            else:
                self.touch(kind, storage.data_ptr(), storage.nbytes(), self.current().handle)

    def ready(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record that the current stream makes a tensor, and owns its memory. Return the tensor."""
        storage = tensor.untyped_storage()
        self._forget(storage.data_ptr(), storage.nbytes())
        self._owners[storage.data_ptr()] = (storage.data_ptr() + storage.nbytes(), self.current().handle)
        self._tensor("write", tensor)
        return tensor

    def use(self, *tensors: torch.Tensor) -> None:
        """Record that the current stream reads tensors."""
        self._tensor("read", *tensors)

    def check_kept(self) -> None:
        """Raise Misuse if a stream has used another stream's memory without `keep`."""
        for address, stream in self._uses:
            if not any(begin <= address < end and stream == other for begin, end, other in self._kept):
                raise Misuse(f"stream {stream} uses memory of another one, which may give it away meanwhile: no keep()")

    def _see(self, tensor: torch.Tensor) -> None:
        """Have the accesses to the memory of `tensor` forgotten when the memory is freed.

        Only the uses of the memory that need `keep` stay recorded.
        """
        storage = tensor.untyped_storage()  # lives as long as any view of it
        if storage not in self._seen:
            self._seen.add(storage)
            weakref.finalize(storage, self._freed.append, (storage.data_ptr(), storage.nbytes())).atexit = False

    def _forget(self, address: int, nbytes: int) -> None:
        """Forget the accesses to earlier memory at this address."""
        end = address + nbytes
        with self._lock:
            for table in (self._writes, self._owners):
                for begin in [b for b, entry in table.items() if b < end and address < entry[0]]:  # type: ignore[attr-defined]
                    del table[begin]  # type: ignore[attr-defined]
            for begin, readers in self._reads.items():
                self._reads[begin] = [entry for entry in readers if not (begin < end and address < entry[0])]

    # The methods of `TorchDevice`, with records of their accesses

    def pointer(self, tensor: torch.Tensor) -> int:
        self._see(tensor)
        return super().pointer(tensor)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        storage = tensor.untyped_storage()
        self._kept.append((storage.data_ptr(), storage.data_ptr() + max(1, storage.nbytes()), stream.handle))

    def empty(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        made = super().empty(shape, dtype)
        nbytes = made.numel() * made.element_size()
        if self.capacity is not None and nbytes > self.capacity:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {nbytes} bytes (fake).")
        self._forget(made.data_ptr(), nbytes)
        self._owners[made.data_ptr()] = (made.data_ptr() + nbytes, self.current().handle)
        return made

    def cast(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        self._tensor("read", tensor)
        return self.ready(super().cast(tensor, dtype))

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        self._tensor("read", source)
        self._tensor("write", into)
        super().copy(source, into)

    def pack(self, tensors: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        self._tensor("read", *tensors)
        self._tensor("write", into)
        super().pack(tensors, into)

    def unpack(self, flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        self._tensor("read", flat)
        self._tensor("write", *tensors)
        super().unpack(flat, tensors)

    def fill(self, tensor: torch.Tensor, value: float) -> None:
        self._tensor("write", tensor)
        super().fill(tensor, value)

    def scale(self, tensor: torch.Tensor, factor: float) -> None:
        self._tensor("write", tensor)
        super().scale(tensor, factor)

    def divide(self, tensor: torch.Tensor, divisor: int) -> None:
        self._tensor("write", tensor)
        super().divide(tensor, divisor)

    def to_host(self, tensor: torch.Tensor) -> Any:
        self._tensor("read", tensor)
        return super().to_host(tensor)

    def from_host(self, array: Any, tensor: torch.Tensor) -> None:
        self._tensor("write", tensor)
        super().from_host(array, tensor)

    # The same for the methods that gradients in flat memory need

    def zeros(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        made = self.empty(shape, dtype)
        self.fill(made, 0)
        return made

    def copy_all(self, sources: list[torch.Tensor], into: list[torch.Tensor]) -> None:
        self._tensor("read", *sources)
        self._tensor("write", *into)
        super().copy_all(sources, into)

    def clear_all(self, tensors: list[torch.Tensor]) -> None:
        self._tensor("write", *tensors)
        super().clear_all(tensors)

    def add(self, source: torch.Tensor, into: torch.Tensor) -> None:
        self._tensor("read", source)
        self._tensor("write", into)
        super().add(source, into)

    def scale_into(self, source: torch.Tensor, factor: float, into: torch.Tensor) -> None:
        self._tensor("read", source)
        self._tensor("write", into)
        super().scale_into(source, factor, into)

    def scale_by_ratio(
        self,
        source: torch.Tensor,
        numerator: torch.Tensor,
        denominator: torch.Tensor,
        room: torch.Tensor,
        into: torch.Tensor,
    ) -> None:
        self._tensor("read", numerator, denominator, source)
        self._tensor("write", room, into)
        super().scale_by_ratio(source, numerator, denominator, room, into)


HERE: ContextVar[FakeDevice | None] = ContextVar("fake_gpu", default=None)
"""The fake GPU of this rank."""
_users = 0
_lock = threading.Lock()


def _of_this_rank(_: torch.device) -> FakeDevice:
    found = HERE.get()
    assert found is not None, "a tensor is used on a thread or rank that has no fake_gpu()"
    return found


@contextlib.contextmanager
def fake_gpu(
    library: Library | str | None = "fake", index: int | None = None, visible: int = 8
) -> Iterator[FakeDevice]:
    """Give this rank a GPU in the body of a with statement. CPU tensors of torch are then on the GPU; NumPy arrays are not.

    Args:
        library: The library in place of NCCL; None for no library. The default is a `FakeNccl` that reports its accesses to
            the device.
        index: The number of the GPU; by default the local rank.
        visible: The number of GPUs that the rank sees.
    """
    global _users
    world = hvdlite.api.world()
    device = FakeDevice(world.topology.local_rank if index is None else index, visible)
    chosen: Any = FakeNccl(accessed=device.touch) if library == "fake" else library
    if isinstance(chosen, FakeNccl):
        chosen.accessed = device.touch
    before = world.devices.load, world.devices.find
    world.devices.load, world.devices.find = (lambda: chosen), (lambda kind: device)
    token = HERE.set(device)
    with _lock:
        _users += 1
        torch_device.MAKERS["cpu"] = _of_this_rank  # type: ignore[assignment]
    try:
        yield device
    finally:
        world.devices.close()
        world.devices.load, world.devices.find = before
        HERE.reset(token)
        with _lock:
            _users -= 1
            if not _users:
                del torch_device.MAKERS["cpu"]
