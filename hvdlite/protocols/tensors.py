"""The contracts by which the core reads and makes a framework's tensors."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import numpy as np

from hvdlite.protocols.device import Device
from hvdlite.protocols.types import Array, TensorInfo

T = TypeVar("T")


class TensorAdapter(Protocol[T]):
    """How the core reads and makes tensors of one framework.

    The core and the adapter exchange NumPy arrays, which share the memory of the tensor if possible. NumPy has no bfloat16:
    such values travel as their bits in uint16, or as float32 (`wide`).
    """

    def info(self, tensor: T) -> TensorInfo:
        """Return the dtype and shape of `tensor`."""
        ...

    def dtype(self, tensor: T) -> str:
        """Return the name of the dtype, as in `TensorInfo`, even for sparse and symbolic tensors."""
        ...

    def cast(self, tensor: T, dtype: str) -> T:
        """Return `tensor` in another dtype, by the framework's own cast, which the framework can differentiate."""
        ...

    def check_writable(self, tensor: T) -> None:
        """Raise UnsupportedTensorError unless `assign` can overwrite `tensor`."""
        ...

    def to_array(self, tensor: T, *, wide: bool) -> Array:
        """Return the values as a C-contiguous array of the tensor's shape, which shares its memory if possible.

        With `wide`, float16 and bfloat16 values are copied to float32, so that they are reduced with its precision.
        """
        ...

    def from_array(self, array: Array, dtype: str, like: T) -> T:
        """Return a new tensor of `dtype`, of the same type and on the same device as `like`. It may keep the memory of `array`.

        The adapters of torch and TensorFlow also take None for `like`: the tensor is then in host memory.

        `array` has the dtype that `to_array` gives for `dtype`, wide or not.
        """
        ...

    def assign(self, tensor: T, array: Array) -> None:
        """Overwrite the values of `tensor` with those of `array`, whose dtype is one that `to_array` gives, wide or not."""
        ...


class HalfConverter(Protocol):
    """Arithmetic in float32 on float16, or on bfloat16 as bits in uint16. All arrays are flat and of equal length."""

    def widen(self, half: Array, wide: Array) -> None:
        """Copy 16-bit values to float32."""
        ...

    def accumulate(self, ufunc: np.ufunc, wide: Array, half: Array) -> None:
        """Compute ``wide = ufunc(wide, half)``. `ufunc` is NumPy's add, multiply, minimum or maximum."""
        ...

    def narrow(self, wide: Array, half: Array) -> None:
        """Copy float32 values to 16-bit values, rounded to the nearest value (halfway cases to the even one)."""
        ...


class DeviceAdapter(TensorAdapter[T], Protocol[T]):
    """A `TensorAdapter` of tensors that may lie on an accelerator. For such tensors `to_array` and `from_array` copy."""

    def device_kind(self, tensor: T) -> str | None:
        """Return the `Device.kind` of the tensor's memory; None for host memory."""
        ...

    def device(self, tensor: T) -> Device:
        """Return the device of a tensor whose `device_kind` is not None.

        Raises:
            DeviceError: A library that is needed for the device is missing.
        """
        ...

    def to_device(self, tensor: T) -> Any:
        """Return the same memory as a tensor of `device`, of the same shape. It is ready on the thread's current stream."""
        ...

    def from_device(self, native: Any, like: T) -> T:
        """Return a tensor of `device` as a tensor of the framework, of the type of `like`: the reverse of `to_device`."""
        ...

    def touch(self, tensor: T) -> None:
        """Tell the framework that the values of `tensor` have changed, through a library that works on addresses."""
        ...

    def lending_device(self, index: int) -> Device:
        """Return the device for arrays of other libraries on GPU number `index`, which the framework sees by DLPack.

        Raises:
            DeviceError: The framework cannot use a GPU.
        """
        ...

    def current_device(self) -> Device:
        """Return the GPU that this process has chosen.

        Raises:
            DeviceError: There is no GPU.
        """
        ...
