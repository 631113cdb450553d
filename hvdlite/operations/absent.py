"""The tensors of a rank that has joined: a dtype and a shape, and no values.

A reduction replaces them by its neutral element (`Reduction.neutral`); what else reads them finds zeros. What is delivered
to them is dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hvdlite.protocols import Array, TensorInfo
from hvdlite.tensors.numpy_adapter import HALF_DTYPES
from hvdlite.tensors.registry import register_adapter


class AbsentTensor(NamedTuple):
    """A tensor without values; its dtype is a name as in `TensorInfo`, its place a `Device.kind`."""

    dtype: str
    shape: tuple[int, ...]
    place: str | None = None


class _AbsentAdapter:
    """Reads `AbsentTensor`, as a `TensorAdapter`."""

    def info(self, tensor: AbsentTensor) -> TensorInfo:
        return TensorInfo(tensor.dtype, tensor.shape)

    def dtype(self, tensor: AbsentTensor) -> str:
        return tensor.dtype

    def cast(self, tensor: AbsentTensor, dtype: str) -> AbsentTensor:
        return tensor._replace(dtype=dtype)

    def device_kind(self, tensor: AbsentTensor) -> str | None:
        return tensor.place

    def check_writable(self, tensor: AbsentTensor) -> None:
        pass

    def to_array(self, tensor: AbsentTensor, *, wide: bool) -> Array:
        if wide and tensor.dtype in HALF_DTYPES:
            return np.zeros(tensor.shape, np.float32)
        return np.zeros(tensor.shape, np.uint16 if tensor.dtype == "bfloat16" else tensor.dtype)

    def from_array(self, array: Array, dtype: str, like: AbsentTensor) -> AbsentTensor:
        return AbsentTensor(dtype, array.shape)

    def assign(self, tensor: AbsentTensor, array: Array) -> None:
        pass


register_adapter(AbsentTensor, _AbsentAdapter())
