"""The arithmetic of a reduction: several pieces of memory become one, with more precision inside where it is needed.

float16 and bfloat16 are accumulated as float32 and rounded once, to the nearest even number, at the end. torch does that
with vector instructions and is used if the process has loaded it; NumPy gives the same bits, slowly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from hvdlite.protocols import Array, HalfConverter, ReduceOp, TensorInfo, ufunc_of
from hvdlite.tensors.frameworks import loaded_adapter
from hvdlite.tensors.numpy_adapter import HALF_DTYPES, widen_bits


class Arithmetic:
    """How arrays of one dtype are reduced by one operation.

    Attributes:
        storage: The dtype of the arrays; bfloat16 is its bits in uint16.
        wide: The dtype in which they are accumulated.
        exact: They are the same, so that a result can be accumulated in place.
    """

    def __init__(self, dtype: str, op: ReduceOp) -> None:
        self._ufunc = ufunc_of(op)
        self.exact = dtype not in HALF_DTYPES
        self.storage: np.dtype[np.generic] = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        self.wide: np.dtype[np.generic] = self.storage if self.exact else np.dtype(np.float32)
        self._half = None if self.exact else half_converter(dtype)

    def combine(self, sources: Sequence[Array], into: Array) -> None:
        """Reduce `sources` in their order.

        Args:
            sources: At least one, of dtype `storage` and equal length.
            into: Of dtype `wide`. May be one of the first two sources, if `exact`.
        """
        if self._half is not None:
            self._half.widen(sources[0], into)
            for source in sources[1:]:
                self._half.accumulate(self._ufunc, into, source)
        elif len(sources) == 1:
            if into is not sources[0]:
                np.copyto(into, sources[0])
        else:
            self._ufunc(sources[0], sources[1], out=into)
            for source in sources[2:]:
                self._ufunc(into, source, out=into)

    def widen(self, source: Array, into: Array) -> None:
        """Copy `source`, of dtype `storage`, to `into`, of dtype `wide`."""
        if self._half is None:
            np.copyto(into, source)
        else:
            self._half.widen(source, into)

    def narrow(self, wide: Array, into: Array) -> None:
        """Copy `wide` to `into`, of dtype `storage`."""
        if self._half is None:
            np.copyto(into, wide)
        else:
            self._half.narrow(wide, into)


class NumpyHalf:
    """float16, or bfloat16 as bits, with NumPy alone."""

    def __init__(self, dtype: str) -> None:
        self._bits = dtype == "bfloat16"

    def widen(self, half: Array, wide: Array) -> None:
        np.copyto(wide, widen_bits(half) if self._bits else half)

    def accumulate(self, ufunc: np.ufunc, wide: Array, half: Array) -> None:
        ufunc(wide, widen_bits(half) if self._bits else half.astype(np.float32), out=wide)

    def narrow(self, wide: Array, half: Array) -> None:
        if self._bits:
            np.copyto(half, narrow_to_bits(wide))
        else:
            with np.errstate(over="ignore"):  # to infinity, as torch does
                np.copyto(half, wide, casting="same_kind")


def narrow_to_bits(wide: Array) -> Array:
    """float32 as bfloat16 bits in uint16, rounded to the nearest, halfway cases to the even one."""
    bits = wide.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    result: Array = np.where(np.isnan(wide), np.uint16(0x7FC0), rounded.astype(np.uint16))
    return result


@functools.cache
def arithmetic(dtype: str, op: ReduceOp) -> Arithmetic:
    """The arithmetic of a dtype (a name of `TensorInfo`) and an operation (not AVERAGE)."""
    return Arithmetic(dtype, op)


def nbytes_of(info: TensorInfo) -> int:
    """The bytes of a tensor."""
    return math.prod(info.shape) * arithmetic(info.dtype, ReduceOp.SUM).storage.itemsize


def half_converter(dtype: str) -> HalfConverter:
    """torch's, if this process has it; else NumPy's."""
    adapter = loaded_adapter("torch")
    make: Callable[[str], HalfConverter] = NumpyHalf if adapter is None else adapter.half_converter
    return make(dtype)
