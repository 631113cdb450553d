"""Which adapter reads which tensor: NumPy's and the array API's here, the frameworks' in their own packages.

A framework's adapter is imported when a tensor of that framework is seen, so that the core never imports one.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import numpy as np

from hvdlite import devices
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import Array, Device, TensorAdapter, TensorInfo

HALF_DTYPES = frozenset({"float16", "bfloat16"})
"""The dtypes that are reduced as float32."""

_FRAMEWORK_ADAPTERS = {"torch": "hvdlite_torch.tensor", "tensorflow": "hvdlite_tf.tensor"}
"""Top-level package that a tensor's class is defined in -> module whose ``ADAPTER`` reads it."""

_adapters: dict[type, TensorAdapter[Any]] = {}


def adapter_for(tensor: Any) -> TensorAdapter[Any]:
    """The adapter that reads tensors of the class of `tensor`.

    Raises:
        UnsupportedTensorError: It is no tensor that hvdlite knows how to read.
    """
    kind = type(tensor)
    adapter = _adapters.get(kind)
    if adapter is None:
        adapter = _adapters[kind] = _find_adapter(tensor)
    return adapter


def _find_adapter(tensor: Any) -> TensorAdapter[Any]:
    if isinstance(tensor, np.ndarray | np.generic):
        return NumpyAdapter()
    for cls in type(tensor).__mro__:
        framework = cls.__module__.partition(".")[0]
        if framework in _FRAMEWORK_ADAPTERS:
            found: TensorAdapter[Any] = _framework_adapter(framework)
            return found
    if any(cls.__name__ == "Tracer" and cls.__module__.partition(".")[0] == "jax" for cls in type(tensor).__mro__):
        raise UnsupportedTensorError(
            "this array has no values yet: JAX is tracing the function, for jit, grad or vmap. Call hvdlite outside of it, on "
            "what it returns; or inside by jax.experimental.io_callback, as docs/jax.md shows."
        )
    if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__array_namespace__"):
        return ArrayApiAdapter()
    raise UnsupportedTensorError(
        f"expected a NumPy array, a torch or TensorFlow tensor, or an array with DLPack and the array API "
        f"(JAX, CuPy); got {type(tensor).__module__}.{type(tensor).__qualname__}. "
        "Wrap numbers and lists as numpy.array(x); send other objects with broadcast_object or allgather_object."
    )


def _framework_adapter(framework: str) -> Any:
    return importlib.import_module(_FRAMEWORK_ADAPTERS[framework]).ADAPTER


def loaded_adapter(framework: str) -> Any | None:
    """The adapter of a framework if this process has imported that; None if not."""
    return _framework_adapter(framework) if framework in sys.modules else None


@functools.cache  # NumPy works a dtype's name out anew each time, for several microseconds
def check_dtype(dtype: np.dtype[Any]) -> str:
    """The contract's name of a NumPy dtype: its own, or ``"bfloat16"`` for the one of ml_dtypes.

    Raises:
        UnsupportedTensorError: It holds no numbers.
    """
    if dtype.kind not in "biufc" and dtype.name != "bfloat16":
        raise UnsupportedTensorError(f"expected numbers or bool; got dtype {dtype}.")
    if not dtype.isnative:
        raise UnsupportedTensorError(
            f"dtype {dtype.str!r} is not in this machine's byte order; use .astype({dtype.name!r})."
        )
    return str(dtype.name)


def widen_bits(bits: Array) -> Array:
    """bfloat16, given as uint16 bits, as float32 (exact: it is the upper half of a float32)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class NumpyAdapter:
    """NumPy arrays and scalars; ml_dtypes' bfloat16 too."""

    def info(self, tensor: Array) -> TensorInfo:
        return TensorInfo(check_dtype(tensor.dtype), tensor.shape)

    def dtype(self, tensor: Array) -> str:
        return check_dtype(tensor.dtype)

    def cast(self, tensor: Array, dtype: str) -> Array:
        if dtype == "bfloat16":
            raise UnsupportedTensorError(
                "NumPy has no bfloat16: compress with Compression.fp16, or pass torch tensors."
            )
        return tensor.astype(dtype)

    def check_writable(self, tensor: Array) -> None:
        if isinstance(tensor, np.generic):
            raise UnsupportedTensorError("a NumPy scalar cannot be changed in place; use an array of shape ().")
        if not tensor.flags.writeable:
            raise UnsupportedTensorError("expected a writable array for an in-place operation; this one is read-only.")

    def to_array(self, tensor: Array, *, wide: bool) -> Array:
        dtype = check_dtype(tensor.dtype)
        if wide and dtype in HALF_DTYPES:
            return np.asarray(tensor, np.float32, order="C")
        array = np.asarray(tensor, order="C")
        return array.view(np.uint16) if dtype == "bfloat16" else array

    def from_array(self, array: Array, dtype: str, like: Array) -> Array:
        result = (
            array
            if array.dtype == dtype
            else self._narrow(array, like.dtype if dtype == "bfloat16" else np.dtype(dtype))
        )
        return result[()] if isinstance(like, np.generic) else result

    def assign(self, tensor: Array, array: Array) -> None:
        if array is not tensor and (tensor.ctypes.data != array.ctypes.data or tensor.dtype != array.dtype):
            np.copyto(tensor, self._narrow(array, tensor.dtype))

    @staticmethod
    def _narrow(array: Array, dtype: np.dtype[Any]) -> Array:
        if check_dtype(dtype) == "bfloat16" and array.dtype == np.uint16:
            return array.view(dtype)
        return array.astype(dtype, copy=False)


class ArrayApiAdapter:
    """Arrays of any library that has DLPack and the array API (https://data-apis.org/array-api), in host memory or on a GPU."""

    def __init__(self) -> None:
        self._numpy = NumpyAdapter()

    def info(self, tensor: Any) -> TensorInfo:
        return TensorInfo(self.dtype(tensor), tuple(tensor.shape))

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype).rpartition(".")[2]

    def cast(self, tensor: Any, dtype: str) -> Any:
        namespace = tensor.__array_namespace__()
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
        return devices.device_kind(tensor)

    def device(self, tensor: Any) -> Device:
        return devices.device_of(tensor)

    def to_device(self, tensor: Any) -> Any:
        return devices.borrow(tensor)

    def from_device(self, native: Any, like: Any) -> Any:
        return devices.lend(native, like)

    def touch(self, tensor: Any) -> None:
        """Nothing here is changed in place."""

    def to_array(self, tensor: Any, *, wide: bool) -> Array:
        if self.device_kind(tensor) is not None:
            device = self.device(tensor)
            flat = device.to_host(device.flat(self.to_device(tensor))).reshape(tensor.shape)
            bits = flat.dtype == np.uint16 and self.dtype(tensor) == "bfloat16"
            return widen_bits(flat) if bits and wide else self._numpy.to_array(flat, wide=wide)
        try:
            array = np.from_dlpack(tensor)
        except (BufferError, RuntimeError, ValueError, TypeError) as error:
            # NumPy cannot import bfloat16 through DLPack, and nothing that is not in host memory.
            try:
                array = np.asarray(tensor)
            except Exception:
                raise UnsupportedTensorError(
                    f"a {type(tensor).__module__} array of dtype {tensor.dtype} cannot be read in host memory ({error}); "
                    "move it to the CPU first."
                ) from error
        return self._numpy.to_array(array, wide=wide)

    def from_array(self, array: Array, dtype: str, like: Any) -> Any:
        namespace = like.__array_namespace__()
        if array.dtype == np.uint16 and dtype == "bfloat16":
            array = widen_bits(array)
        wanted = getattr(namespace, dtype)
        result = namespace.asarray(array)
        return result if result.dtype == wanted else namespace.astype(result, wanted)

    def assign(self, tensor: Any, array: Array) -> None:
        self.check_writable(tensor)


def device_kind_of(tensor: Any, adapter: Any) -> str | None:
    """`Device.kind` of where a tensor lies; None for host memory, which is all that a plain `TensorAdapter` reads."""
    ask = getattr(adapter, "device_kind", None)
    kind: str | None = None if ask is None else ask(tensor)
    return kind


def register_adapter(kind: type, adapter: TensorAdapter[Any]) -> None:
    """Let `adapter` read tensors of class `kind`: how another package plugs its own tensors in.

    Raises:
        ArgumentError: `kind` is no class.
    """
    if not isinstance(kind, type):
        raise ArgumentError(f"expected a class; got {kind!r}.")
    _adapters[kind] = adapter
