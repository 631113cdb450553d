"""The tensors of a rank that has joined: a dtype and a shape, and no values.

A reduction replaces them by its neutral element (`neutral_element`); what else reads them finds zeros. What is delivered
to them is dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hvdlite.protocols import Array, ReduceOp, TensorInfo
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


def neutral_element(op: ReduceOp, dtype: np.dtype[np.generic]) -> float:
    """What changes no result of `op`: 0, 1, or the far end of the range of `dtype`.

    Zeros also are what Adasum leaves out (arXiv:2006.02924: a vector of length 0 has no direction).
    """
    if op is ReduceOp.PRODUCT:
        return 1
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return 0
    if dtype.kind in "iu":
        limits = np.iinfo(dtype.name)
        return limits.max if op is ReduceOp.MIN else limits.min
    return np.inf if op is ReduceOp.MIN else -np.inf
