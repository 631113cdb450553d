"""CuPy's streams and memory."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import Array, Stream
from hvdlite.tensors.held import Held


class CupyStream:
    """A stream of CuPy as `hvdlite.protocols.Stream`.

    Args:
        raw: CuPy's stream.
        gpu: Returns a context manager in which the stream's GPU is the thread's current GPU. CuPy makes events on the current
            GPU, and its default stream is that of the current GPU.
    """

    def __init__(self, raw: Any, gpu: Callable[[], Any]) -> None:
        self.raw, self._gpu = raw, gpu

    @property
    def handle(self) -> int:
        return int(self.raw.ptr)

    def record(self) -> Any:
        with self._gpu():
            return self.raw.record()

    def wait(self, event: Any) -> None:
        with self._gpu():
            self.raw.wait_event(event)

    def synchronize(self) -> None:
        with self._gpu():
            self.raw.synchronize()


_copying = (
    Held()
)  # CuPy gives page-locked memory to the next user when its owner drops it, even while a copy writes to it


class CupyMirror:
    """A `hvdlite.protocols.HostMirror` in memory of CuPy.

    Args:
        cupy: The module ``cupy``.
        count: The length of `values`.
    """

    def __init__(self, cupy: Any, count: int) -> None:
        self._cupy = cupy
        self._memory = cupy.cuda.alloc_pinned_memory(8 * count)
        self.values: Array = np.frombuffer(self._memory, np.float64, count)
        self.values[:] = 0

    def take(self, tensor: Any) -> None:
        stream = self._cupy.cuda.get_current_stream()
        tensor.data.copy_to_host_async(self.values.ctypes.data, self.values.nbytes, stream)
        _copying.until(stream.record(), self._memory, lambda event: event.done)


@functools.cache
def cupy_device_of(index: int) -> CupyDevice:
    return CupyDevice(index)


class CupyDevice:
    """A GPU by way of CuPy, as `hvdlite.protocols.Device`.

    Args:
        index: CuPy's number of the GPU.
    """

    kind = "cuda"
    library = "cupy"

    def __init__(self, index: int) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self.index = index
        self._held = Held()

    @functools.cached_property
    def identity(self) -> str:
        """The UUID of the GPU in torch's notation, so that ranks with torch and ranks with CuPy can be compared."""
        digits = bytes(self._cupy.cuda.runtime.getDeviceProperties(self.index)["uuid"]).hex()
        if len(digits) < 32:  # CuPy reads the UUID as text, which ends at a zero byte
            return str(self._gpu().pci_bus_id)
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32]))

    def _gpu(self) -> Any:
        return self._cupy.cuda.Device(self.index)

    @property
    def visible(self) -> int:
        return int(self._cupy.cuda.runtime.getDeviceCount())

    def current(self) -> Stream:
        with self._gpu():
            return CupyStream(self._cupy.cuda.get_current_stream(), self._gpu)

    def side(self) -> Stream:
        with self._gpu():
            return CupyStream(self._cupy.cuda.Stream(non_blocking=True, priority=-1), self._gpu)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        with self._gpu(), stream.raw:
            yield

    def keep(self, tensor: Any, stream: Any) -> None:
        self._held.until(stream.record(), tensor, self.is_over)

    def pointer(self, tensor: Any) -> int:
        return int(tensor.data.ptr)

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype.name)

    def count(self, tensor: Any) -> int:
        return int(tensor.size)

    def is_plain(self, tensor: Any) -> bool:
        return bool(tensor.flags.c_contiguous)

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        return self._cupy.empty(tuple(shape), self._dtype(dtype))

    def _dtype(self, name: str) -> Any:
        try:
            return np.dtype(name)
        except TypeError:
            raise UnsupportedTensorError(f"CuPy arrays have no dtype {name}: install torch, or cast.") from None

    def flat(self, tensor: Any) -> Any:
        return tensor.reshape(-1)

    def shaped(self, tensor: Any, shape: Sequence[int]) -> Any:
        return tensor.reshape(tuple(shape))

    def view(self, tensor: Any, dtype: str) -> Any:
        return tensor.view(self._dtype(dtype))

    def cast(self, tensor: Any, dtype: str) -> Any:
        return tensor.astype(self._dtype(dtype))

    def copy(self, source: Any, into: Any) -> None:
        into[...] = source

    def pack(self, tensors: Sequence[Any], into: Any) -> None:
        start = 0
        for tensor in tensors:
            into[start : start + tensor.size].reshape(tensor.shape)[...] = tensor
            start += tensor.size

    def unpack(self, flat: Any, tensors: Sequence[Any]) -> None:
        start = 0
        for tensor in tensors:
            tensor[...] = flat[start : start + tensor.size].reshape(tensor.shape)
            start += tensor.size

    def fill(self, tensor: Any, value: float) -> None:
        tensor.fill(value)

    def scale(self, tensor: Any, factor: float) -> None:
        if tensor.dtype.itemsize == 2:  # float16 may not be able to hold the factor
            tensor[...] = tensor.astype(np.float32) * np.float32(factor)
        else:
            tensor *= tensor.dtype.type(factor)

    def divide(self, tensor: Any, divisor: int) -> None:
        if tensor.dtype.kind in "iu":
            signs = (1 - 2 * (tensor < 0)).astype(tensor.dtype)
            tensor[...] = abs(tensor) // tensor.dtype.type(divisor) * signs
        else:
            tensor /= tensor.dtype.type(divisor)

    def to_host(self, tensor: Any) -> Array:
        array: Array = self._cupy.asnumpy(tensor, stream=self.current().raw)  # type: ignore[attr-defined]
        return array

    def from_host(self, array: Array, tensor: Any) -> None:
        tensor.set(np.ascontiguousarray(array))
        self.current().synchronize()

    # For gradients in flat memory

    @property
    def place(self) -> str:
        return f"{self.kind}:{self.index}"

    @property
    def no_memory(self) -> type[Exception]:
        found: type[Exception] = self._cupy.cuda.memory.OutOfMemoryError
        return found

    def is_capturing(self) -> bool:
        with self._gpu():
            return bool(self._cupy.cuda.get_current_stream().is_capturing())

    def is_over(self, event: Any) -> bool:
        return bool(event.done)

    def mirror(self, count: int) -> CupyMirror:
        return CupyMirror(self._cupy, count)

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        return self._cupy.zeros(tuple(shape), self._dtype(dtype))

    def strided(self, flat: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
        # A reshape makes the axes in their order in memory, because there are no gaps. Then the axes change places.
        order = sorted(range(len(shape)), key=lambda axis: (-strides[axis], -shape[axis], axis))
        plain = flat.reshape([shape[axis] for axis in order])
        return plain.transpose([order.index(axis) for axis in range(len(shape))])

    def where(self, tensor: Any) -> tuple[Any, ...]:
        return self.pointer(tensor), tensor.shape, tensor.strides, tensor.dtype

    def is_at(self, tensor: Any, where: tuple[Any, ...]) -> bool:
        return self.pointer(tensor) == where[0] and self.where(tensor) == where

    def version(self, tensor: Any) -> int:
        return 0  # CuPy does not count writes

    def allocation(self, tensor: Any) -> int:
        return int(tensor.data.mem.ptr)

    def users(self, tensor: Any) -> int:
        return sys.getrefcount(tensor.data.mem)

    def alias(self, tensor: Any) -> Any:
        return tensor.view()

    def copy_all(self, sources: list[Any], into: list[Any]) -> None:
        for source, target in zip(sources, into, strict=True):
            target[...] = source

    def clear_all(self, tensors: list[Any]) -> None:
        for tensor in tensors:
            tensor.fill(0)

    def add(self, source: Any, into: Any) -> None:
        into += source

    def scale_into(self, source: Any, factor: float, into: Any) -> None:
        if source.dtype.itemsize == 2:  # see `scale`
            source = source.astype(np.float32)
        into[...] = source * source.dtype.type(factor)

    def scale_by_ratio(self, source: Any, numerator: Any, denominator: Any, room: Any, into: Any) -> None:
        room[...] = numerator / denominator
        np.multiply(source, room, out=into, dtype=into.dtype)  # CuPy's, which NumPy's ufuncs call for its arrays
