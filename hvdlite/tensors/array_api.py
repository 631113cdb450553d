"""The adapter that reads arrays of the array API standard as flat memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import Array, Device, TensorInfo
from hvdlite.tensors import device_registry
from hvdlite.tensors.numpy_adapter import NumpyAdapter, widen_bits


class ArrayApiAdapter:
    """Reads arrays of any library with DLPack and the array API (https://data-apis.org/array-api), on the host or on a GPU."""

    def __init__(self) -> None:
        self._numpy = NumpyAdapter()

    def info(self, tensor: Any) -> TensorInfo:
        return TensorInfo(self.dtype(tensor), tuple(tensor.shape))

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype).rpartition(".")[2]

    def cast(self, tensor: Any, dtype: str) -> Any:
        namespace = device_registry.namespace_of(tensor)
        wanted = getattr(namespace, dtype, None)
        if wanted is None:
            raise UnsupportedTensorError(f"{namespace.__name__} has no {dtype}: choose another compression.")
        return namespace.astype(tensor, wanted)

    def check_writable(self, tensor: Any) -> None:
        library = type(tensor).__module__.partition(".")[0]
        raise UnsupportedTensorError(
            f"arrays of {library} cannot be changed in place; use the form that returns a new one."
        )

    def device_kind(self, tensor: Any) -> str | None:
        return device_registry.device_kind(tensor)

    def device(self, tensor: Any) -> Device:
        return device_registry.device_of(tensor)

    def to_device(self, tensor: Any) -> Any:
        return device_registry.to_native(tensor)

    def from_device(self, native: Any, like: Any) -> Any:
        return device_registry.from_native(native, like)

    def touch(self, tensor: Any) -> None:
        """Do nothing: these arrays are never changed in place."""

    def to_array(self, tensor: Any, *, wide: bool) -> Array:
        if self.device_kind(tensor) is not None:
            device = self.device(tensor)
            flat = device.to_host(device.flat(self.to_device(tensor))).reshape(tensor.shape)
            bits = flat.dtype == np.uint16 and self.dtype(tensor) == "bfloat16"
            return widen_bits(flat) if bits and wide else self._numpy.to_array(flat, wide=wide)
        try:
            array = np.from_dlpack(tensor)
        except (BufferError, RuntimeError, ValueError, TypeError) as error:
            # NumPy cannot import bfloat16 through DLPack, nor anything outside of host memory.
            try:
                array = np.asarray(tensor)
            except Exception:
                raise UnsupportedTensorError(
                    f"a {type(tensor).__module__} array of dtype {tensor.dtype} cannot be read in host memory ({error}); "
                    "move it to the CPU first."
                ) from error
        return self._numpy.to_array(array, wide=wide)

    def from_array(self, array: Array, dtype: str, like: Any) -> Any:
        namespace = device_registry.namespace_of(like)
        if array.dtype == np.uint16 and dtype == "bfloat16":
            array = widen_bits(array)
        wanted = getattr(namespace, dtype)
        result = namespace.asarray(array)
        result = result if result.dtype == wanted else namespace.astype(result, wanted)
        return _beside(result, like)

    def assign(self, tensor: Any, array: Array) -> None:
        self.check_writable(tensor)


def _beside(array: Any, like: Any) -> Any:
    """Return `array` on the device of `like`, if the library can move arrays. JAX puts new arrays on its default device."""
    if not hasattr(array, "to_device") or array.device == like.device:
        return array
    return array.to_device(like.device)
