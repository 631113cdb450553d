"""The tensors of a rank that has joined: they have a dtype and a shape, and no values.

A reduction uses its neutral element as their values (`Reduction.neutral`). Every other operation reads zeros. A result that is
written to such a tensor is dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hvdlite.protocols import Array, TensorInfo
from hvdlite.tensors.numpy_adapter import HALF_DTYPES
from hvdlite.tensors.registry import register_adapter


class AbsentTensor(NamedTuple):
    """A tensor without values.

    Attributes:
        dtype: The name of the dtype, as in `TensorInfo`.
        shape: The shape.
        kind: The `Device.kind` of the other ranks' tensors; None for host memory.
    """

    dtype: str
    shape: tuple[int, ...]
    kind: str | None = None


class _AbsentAdapter:
    """The `TensorAdapter` for `AbsentTensor`."""

    def info(self, tensor: AbsentTensor) -> TensorInfo:
        return TensorInfo(tensor.dtype, tensor.shape)

    def dtype(self, tensor: AbsentTensor) -> str:
        return tensor.dtype

    def cast(self, tensor: AbsentTensor, dtype: str) -> AbsentTensor:
        return tensor._replace(dtype=dtype)

    def device_kind(self, tensor: AbsentTensor) -> str | None:
        return tensor.kind

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
