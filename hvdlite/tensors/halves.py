"""Converts float16, and bfloat16 as bits in uint16, to float32 and back.

torch does this with vector instructions, and is used if the process has loaded it. NumPy gives the same bits, slowly.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvdlite.protocols import Array, HalfConverter
from hvdlite.tensors.frameworks import loaded_adapter
from hvdlite.tensors.numpy_adapter import widen_bits


class NumpyHalf:
    """The `HalfConverter` that needs NumPy alone.

    Args:
        dtype: "float16", or "bfloat16" for arrays that hold bfloat16 as bits in uint16.
    """

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
    """Return float32 as bfloat16 bits in uint16, rounded to the nearest value, and halfway cases to the even one."""
    bits = wide.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    result: Array = np.where(np.isnan(wide), np.uint16(0x7FC0), rounded.astype(np.uint16))
    return result


def half_converter(dtype: str) -> HalfConverter:
    """Return torch's converter if this process has loaded torch; else NumPy's."""
    adapter = loaded_adapter("torch")
    make: Callable[[str], HalfConverter] = NumpyHalf if adapter is None else adapter.half_converter
    return make(dtype)
