"""How the core reads and makes torch tensors."""

from __future__ import annotations

import numpy as np
import torch

from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import Array, TensorInfo
from hvdlite.tensors import HALF_DTYPES

_DTYPES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    )
}
_TORCH: dict[str, torch.dtype] = {name: dtype for dtype, name in _DTYPES.items()}


class TorchAdapter:
    """Dense torch tensors in host memory."""

    def info(self, tensor: torch.Tensor) -> TensorInfo:
        if tensor.layout is not torch.strided:
            raise UnsupportedTensorError(f"expected a dense tensor; got layout {tensor.layout}. Use tensor.to_dense().")
        if tensor.device.type != "cpu":
            raise UnsupportedTensorError(
                f"expected a tensor in host memory; got one on {tensor.device}. Use tensor.cpu()."
            )
        if tensor.dtype not in _DTYPES:
            raise UnsupportedTensorError(
                f"tensors of dtype {tensor.dtype} cannot be exchanged; cast them to another dtype."
            )
        return TensorInfo(_DTYPES[tensor.dtype], tuple(tensor.shape))

    def check_writable(self, tensor: torch.Tensor) -> None:
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if length > 1 and stride == 0:
                raise UnsupportedTensorError(
                    "an expanded tensor cannot be changed in place: its elements share memory; use .clone()."
                )

    def to_array(self, tensor: torch.Tensor, *, wide: bool) -> Array:
        tensor = tensor.detach().contiguous().resolve_conj().resolve_neg()
        if wide and _DTYPES[tensor.dtype] in HALF_DTYPES:
            return tensor.float().numpy()
        if tensor.dtype is torch.bfloat16:
            return tensor.view(torch.uint16).numpy()
        array: Array = tensor.numpy()
        return array

    def from_array(self, array: Array, dtype: str, like: torch.Tensor) -> torch.Tensor:
        # A 0-d result of NumPy arithmetic may be a scalar, which torch does not take.
        result = torch.from_numpy(np.asarray(array))
        wanted = _TORCH[dtype]
        if wanted is torch.bfloat16 and result.dtype is torch.uint16:
            return result.view(wanted)
        return result.to(wanted)

    def assign(self, tensor: torch.Tensor, array: Array) -> None:
        result = self.from_array(array, _DTYPES[tensor.dtype], tensor)
        if result.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(result)


ADAPTER = TorchAdapter()
