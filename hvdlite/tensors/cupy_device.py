"""CuPy's streams and memory."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import Array, Stream
from hvdlite.tensors.held import Held


class CupyStream:
    """A stream of CuPy's.

    Args:
        raw: The stream.
        gpu: For a with statement: its GPU is the thread's current one. On that CuPy makes events, and of that is the default
            stream.
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


@functools.cache
def cupy_device_of(index: int) -> CupyDevice:
    return CupyDevice(index)


class CupyDevice:
    """A GPU by CuPy, as `hvdlite.protocols.Device`.

    Args:
        index: Its number.
    """

    kind = "cuda"
    library = "cupy"

    def __init__(self, index: int) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self.index = index
        self._held = Held()

    @functools.cached_property
    def identity(self) -> str:
        """As torch writes it, so that ranks with torch and ranks with CuPy can be compared."""
        digits = bytes(self._cupy.cuda.runtime.getDeviceProperties(self.index)["uuid"]).hex()
        if len(digits) < 32:  # CuPy takes it for text that ends with a zero byte
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
        self._held.until(stream.record(), tensor, lambda event: event.done)

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
        if tensor.dtype.itemsize == 2:  # halves, of which the factor may be none
            tensor[...] = tensor.astype(np.float32) * np.float32(factor)
        else:
            tensor *= tensor.dtype.type(factor)

    def divide(self, tensor: Any, divisor: int) -> None:
        if tensor.dtype.kind in "iu":
            tensor //= tensor.dtype.type(divisor)
        else:
            tensor /= tensor.dtype.type(divisor)

    def to_host(self, tensor: Any) -> Array:
        array: Array = self._cupy.asnumpy(tensor, stream=self.current().raw)  # type: ignore[attr-defined]
        return array

    def from_host(self, array: Array, tensor: Any) -> None:
        tensor.set(np.ascontiguousarray(array))
        self.current().synchronize()
