"""The adapter that reads NumPy's arrays as flat memory."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np

from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import Array, TensorInfo

HALF_DTYPES = frozenset({"float16", "bfloat16"})
"""The dtypes that are reduced as float32."""


@functools.cache  # NumPy works a dtype's name out anew each time, for several microseconds
def check_dtype(dtype: np.dtype[Any]) -> str:
    """Return the name of a NumPy dtype as in `TensorInfo`: NumPy's name, or ``"bfloat16"`` for that of ml_dtypes.

    Raises:
        UnsupportedTensorError: The dtype holds neither numbers nor bool, or is not in this machine's byte order.
    """
    if dtype.kind not in "biufc" and dtype.name != "bfloat16":
        raise UnsupportedTensorError(f"expected numbers or bool; got dtype {dtype}.")
    if not dtype.isnative:
        raise UnsupportedTensorError(
            f"dtype {dtype.str!r} is not in this machine's byte order; use .astype({dtype.name!r})."
        )
    return str(dtype.name)


def dtype_of(info: TensorInfo) -> np.dtype[Any]:
    """Return NumPy's dtype for a tensor. For bfloat16 it is that of ml_dtypes, or uint16 for the bits without ml_dtypes."""
    return _bfloat16() if info.dtype == "bfloat16" else np.dtype(info.dtype)


@functools.cache
def _bfloat16() -> np.dtype[Any]:
    try:
        ml_dtypes: Any = importlib.import_module("ml_dtypes")
    except ModuleNotFoundError:
        return np.dtype(np.uint16)
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def widen_bits(bits: Array) -> Array:
    """Return bfloat16 bits in uint16 as float32. This is exact, because bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class NumpyAdapter:
    """Reads NumPy's arrays and scalars, and those of ml_dtypes' bfloat16."""

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
