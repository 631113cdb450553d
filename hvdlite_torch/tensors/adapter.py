"""The adapter by which the core reads and makes torch tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import Array, Device, TensorInfo
from hvdlite.tensors.numpy_adapter import HALF_DTYPES
from hvdlite_torch.tensors.device import (
    DTYPES,
    FLOAT8,
    TORCH,
    TorchDevice,
    current_device,
    device_kind,
    device_of,
    lending_device,
)
from hvdlite_torch.tensors.sliced import is_sliced


class _Memory:
    """The memory of a tensor, for NumPy."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # kept alive
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "typestr": _TYPES[tensor.dtype],
        }


_TYPES = {dtype: np.dtype(name).str for dtype, name in DTYPES.items() if dtype is not torch.bfloat16}


def array_of(tensor: torch.Tensor) -> Array:
    """Return a contiguous tensor in host memory as an array that shares its memory.

    After ``tensor.numpy()`` torch takes the memory for NumPy's: it could not be resized, as FSDP does, and a gradient there
    would not count as its parameter's own (`hvdlite_torch.tensors.ownership.is_exclusive`).
    """
    return np.asarray(_Memory(tensor))


def check_writable(tensor: torch.Tensor) -> None:
    """Raise UnsupportedTensorError if several elements are the same memory, as torch.expand makes them."""
    if not tensor.is_contiguous() and any(
        length > 1 and stride == 0 for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise UnsupportedTensorError(
            "an expanded tensor cannot be changed in place: its elements share memory; use .clone()."
        )


class TorchAdapter:
    """The adapter for dense torch tensors, in host memory or on a GPU. See `hvdlite.protocols.DeviceAdapter`."""

    def info(self, tensor: torch.Tensor) -> TensorInfo:
        if tensor.layout is not torch.strided:
            raise UnsupportedTensorError(f"expected a dense tensor; got layout {tensor.layout}. Use tensor.to_dense().")
        if tensor.is_meta:
            raise UnsupportedTensorError(
                f"expected a tensor in host memory; got one of shape {tuple(tensor.shape)} on meta, which has no values. Give "
                'its module memory by module.to_empty(device="cpu"), and values, before.'
            )
        if is_sliced(tensor):
            raise UnsupportedTensorError(
                f"expected a plain tensor; got a DTensor of shape {tuple(tensor.shape)}, of which this rank has a slice. Use "
                "tensor.to_local() for the slice, tensor.full_tensor() for the whole."
            )
        if not tensor.is_cpu and device_kind(tensor) is None:
            raise UnsupportedTensorError(
                f"expected a tensor in host memory or on a CUDA (or ROCm) GPU; got one on {tensor.device}. Use tensor.cpu()."
            )
        return TensorInfo(self.dtype(tensor), tuple(tensor.shape))

    def dtype(self, tensor: torch.Tensor) -> str:
        name = DTYPES.get(tensor.dtype)
        if name is None and device_kind(tensor) is not None:
            name = FLOAT8.get(tensor.dtype)
        if name is None:
            raise UnsupportedTensorError(
                f"tensors of dtype {tensor.dtype} cannot be exchanged; cast them to another dtype."
            )
        return name

    def cast(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        return tensor.to(TORCH[dtype])

    def check_writable(self, tensor: torch.Tensor) -> None:
        check_writable(tensor)

    def device_kind(self, tensor: torch.Tensor) -> str | None:
        return device_kind(tensor)

    def device(self, tensor: torch.Tensor) -> Device:
        return device_of(tensor)

    def lending_device(self, index: int) -> Device:
        return lending_device(index)

    def current_device(self) -> Device:
        return current_device()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def from_device(self, native: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return native

    def touch(self, tensor: torch.Tensor) -> None:
        if not tensor.is_inference():  # inference tensors have no version counter
            torch.autograd.graph.increment_version(tensor)

    def to_array(self, tensor: torch.Tensor, *, wide: bool) -> Array:
        if tensor.dtype in FLOAT8:
            raise UnsupportedTensorError(
                f"{tensor.dtype} has a Sum, an Average and a Product by NCCL 2.24 or later, and nothing in host memory; "
                "cast it to float16."
            )
        if tensor.requires_grad:
            tensor = tensor.detach()
        if not tensor.is_cpu:
            tensor = TorchDevice(tensor.device).fetch(tensor)
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        if tensor.is_complex() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if wide and DTYPES[tensor.dtype] in HALF_DTYPES:
            return array_of(tensor.float())
        if tensor.dtype is torch.bfloat16:
            return array_of(tensor.view(torch.uint16))
        return array_of(tensor)

    def from_array(self, array: Array, dtype: str, like: torch.Tensor | None) -> torch.Tensor:
        # A 0-d result of NumPy arithmetic may be a scalar, which torch does not take.
        result = torch.from_numpy(np.asarray(array))
        wanted = TORCH[dtype]
        if wanted is torch.bfloat16 and result.dtype is torch.uint16:
            result = result.view(wanted)
        if like is None or like.is_cpu:
            return result.to(wanted)
        made = torch.empty(result.shape, dtype=wanted, device=like.device)
        TorchDevice(like.device).send(result, made)
        return made

    def assign(self, tensor: torch.Tensor, array: Array) -> None:
        if array.size and torch.from_numpy(array).data_ptr() == tensor.data_ptr():
            self.touch(tensor)  # autograd must know of this change, as it knows of torch's own changes in place
            return
        with torch.no_grad():
            tensor.copy_(self.from_array(array, DTYPES[tensor.dtype], tensor))

    def half_converter(self, dtype: str) -> TorchHalf:
        """Return the arithmetic on float16 or bfloat16 in NumPy arrays. See `hvdlite.protocols.HalfConverter`."""
        return TorchHalf(dtype)


_FUNCTIONS: dict[np.ufunc, Callable[..., torch.Tensor]] = {
    np.add: torch.add,
    np.multiply: torch.mul,
    np.minimum: torch.minimum,
    np.maximum: torch.maximum,
}


class _Exposed:
    """A read-only array, such as TensorFlow's, that claims to be writable. torch, which only reads it, warns of others."""

    def __init__(self, array: Array) -> None:
        self._array = array  # kept alive
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


class TorchHalf:
    """Arithmetic on arrays of float16, or of bfloat16 as uint16, with torch's vectorised kernels."""

    def __init__(self, dtype: str) -> None:
        self._dtype = TORCH[dtype]

    def _half(self, array: Array) -> torch.Tensor:
        if not array.flags.writeable:
            array = np.asarray(_Exposed(array))
        return torch.from_numpy(array).view(self._dtype)

    def widen(self, half: Array, wide: Array) -> None:
        torch.from_numpy(wide).copy_(self._half(half))

    def accumulate(self, ufunc: np.ufunc, wide: Array, half: Array) -> None:
        into = torch.from_numpy(wide)
        _FUNCTIONS[ufunc](into, self._half(half).float(), out=into)

    def narrow(self, wide: Array, half: Array) -> None:
        self._half(half).copy_(torch.from_numpy(wide))


def are_same(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor] | None) -> bool:
    """Return whether two sequences hold the same objects in the same order; False if `others` is None."""
    return others is not None and len(tensors) == len(others) and all(map(operator.is_, tensors, others))


ADAPTER = TorchAdapter()
