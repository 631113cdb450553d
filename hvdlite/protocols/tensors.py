"""How the core reads and makes a framework's tensors."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import numpy as np

from hvdlite.protocols.device import Device
from hvdlite.protocols.types import Array, TensorInfo

T = TypeVar("T")


class TensorAdapter(Protocol[T]):
    """How the core reads and makes tensors of one framework.

    Between the core and a framework travels a NumPy array, shared with the tensor where that is
    possible. bfloat16, which NumPy lacks, travels as its bits in uint16, or as float32 (`wide`).
    """

    def info(self, tensor: T) -> TensorInfo:
        """The dtype and shape of `tensor`."""
        ...

    def dtype(self, tensor: T) -> str:
        """The name of the dtype, as in `TensorInfo`; of tensors that cannot be exchanged too (sparse ones, symbols)."""
        ...

    def cast(self, tensor: T, dtype: str) -> T:
        """`tensor` in another dtype, by the framework's own cast, which it can differentiate."""
        ...

    def check_writable(self, tensor: T) -> None:
        """Let a tensor pass that `assign` can overwrite.

        Raises:
            UnsupportedTensorError: It cannot be overwritten.
        """
        ...

    def to_array(self, tensor: T, *, wide: bool) -> Array:
        """The values as a C-contiguous array of the tensor's shape, sharing its memory if possible.

        With `wide`, float16 and bfloat16 become float32 (a copy), to be reduced with its accuracy.
        """
        ...

    def from_array(self, array: Array, dtype: str, like: T) -> T:
        """A new tensor of `dtype` of the same kind (and device) as `like`, that may keep `array`'s memory.

        `array` has the dtype that `to_array` gives for `dtype`, wide or not.
        """
        ...

    def assign(self, tensor: T, array: Array) -> None:
        """Overwrite the values of `tensor` with those of `array` (as `to_array` gives them, wide or not)."""
        ...


class HalfConverter(Protocol):
    """Arithmetic on float16, or on bfloat16 as bits in uint16, by way of float32. All arrays are flat and of equal length."""

    def widen(self, half: Array, wide: Array) -> None:
        """Copy halves to float32."""
        ...

    def accumulate(self, ufunc: np.ufunc, wide: Array, half: Array) -> None:
        """``wide = ufunc(wide, half)``; add, multiply, minimum or maximum."""
        ...

    def narrow(self, wide: Array, half: Array) -> None:
        """Copy float32 to halves, rounding to nearest even."""
        ...


class DeviceAdapter(TensorAdapter[T], Protocol[T]):
    """A `TensorAdapter` of tensors that may lie on an accelerator. Of these, `to_array` and `from_array` copy."""

    def device_kind(self, tensor: T) -> str | None:
        """`Device.kind` of where the tensor lies; None for host memory."""
        ...

    def device(self, tensor: T) -> Device:
        """Where a tensor lies of which `device_kind` is not None.

        Raises:
            DeviceError: What is needed to work on it is not there.
        """
        ...

    def to_device(self, tensor: T) -> Any:
        """The same memory as a tensor of `device`, of the same shape; ready on the calling thread's current stream."""
        ...

    def from_device(self, native: Any, like: T) -> T:
        """The reverse, of the kind of `like`."""
        ...

    def touch(self, tensor: T) -> None:
        """Tell the framework that the values of a tensor have changed, by what works on addresses."""
        ...

    def lending_device(self, index: int) -> Device:
        """What works on arrays of other libraries that lie on the GPU of this number, lent to the framework by DLPack.

        Raises:
            DeviceError: The framework cannot use a GPU.
        """
        ...

    def current_device(self) -> Device:
        """The GPU that this process has chosen.

        Raises:
            DeviceError: There is none.
        """
        ...
