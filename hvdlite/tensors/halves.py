"""Arithmetic on float16, and on bfloat16 as its bits in uint16, by way of float32.

torch has vector instructions for this. It is used if the process has loaded it. NumPy gives the same bits, more slowly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvdlite.protocols import Array, HalfConverter
from hvdlite.tensors.frameworks import loaded_adapter
from hvdlite.tensors.numpy_adapter import widen_bits


class NumpyHalf:
    """The `HalfConverter` for float16, or for bfloat16 as bits, by NumPy alone."""

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
            with np.errstate(over="ignore"):  # values that are too large become infinite, as in torch
                np.copyto(half, wide, casting="same_kind")


def narrow_to_bits(wide: Array) -> Array:
    """Return float32 values as bfloat16 bits in uint16, rounded to the nearest value (halfway cases to the even one)."""
    bits = wide.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    result: Array = np.where(np.isnan(wide), np.uint16(0x7FC0), rounded.astype(np.uint16))
    return result


def half_converter(dtype: str) -> HalfConverter:
    """Return the converter of torch if this process has loaded torch; else that of NumPy."""
    adapter = loaded_adapter("torch")
    make: Callable[[str], HalfConverter] = NumpyHalf if adapter is None else adapter.half_converter
    return make(dtype)
