"""Torch tensors as flat NumPy arrays for the collectives, and torch's reductions in our words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.errors import ArgumentError, NotYetError, UnsupportedTensorError
from hvdlite.protocols import Array, ReduceOp
from hvdlite.tensors.reduction import Reduction, reduction
from hvdlite_torch.tensors.adapter import array_of, check_writable
from hvdlite_torch.tensors.device import DTYPES

_Op: Any = dist.ReduceOp.RedOpType
_OPS = {
    _Op.SUM: ReduceOp.SUM,
    _Op.AVG: ReduceOp.AVERAGE,
    _Op.PRODUCT: ReduceOp.PRODUCT,
    _Op.MIN: ReduceOp.MIN,
    _Op.MAX: ReduceOp.MAX,
}
_BITWISE = {_Op.BAND: np.bitwise_and, _Op.BOR: np.bitwise_or, _Op.BXOR: np.bitwise_xor}
_FOR_BOOL = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}
"""A sum of truth values is "or", and a product is "and", as with gloo."""


class Operand:
    """A tensor as a flat array, which shares its memory if it is contiguous.

    Args:
        tensor: A dense tensor in host memory, of any dtype and shape.
        is_written: Whether the collective writes to the tensor. If not, elements may share memory (torch.expand).

    Raises:
        UnsupportedTensorError: The tensor is not dense, or cannot be written to. Nothing was sent.

    Attributes:
        values: The array, of shape ``(n,)``: bfloat16 as bits in uint16, bool as uint8, and dtypes that NumPy lacks as bytes.
    """

    __slots__ = ("_copied_from", "_flat", "values")

    def __init__(self, tensor: torch.Tensor, is_written: bool) -> None:
        if tensor.layout is not torch.strided:
            raise UnsupportedTensorError(f"expected a dense tensor; got layout {tensor.layout}. Use tensor.to_dense().")
        if is_written:
            check_writable(tensor)
        plain = tensor.detach()
        self._copied_from: torch.Tensor | None = None
        if not tensor.is_contiguous() or tensor.is_neg() or (tensor.is_complex() and tensor.is_conj()):
            self._copied_from = plain
            plain = plain.resolve_conj().resolve_neg().contiguous()
        flat = plain.reshape(-1) if plain.numel() else plain.new_empty(0)  # an empty tensor may have any strides
        if flat.dtype in _AS_BITS:
            flat = flat.view(_AS_BITS[flat.dtype])
        elif flat.dtype not in DTYPES:
            flat = flat.view(torch.uint8)
        self._flat = flat
        self.values: Array = array_of(flat)

    def write_back(self) -> None:
        """Make the tensor see what was written to `values`."""
        if self._copied_from is not None:
            self._copied_from.copy_(self._flat.view(self._copied_from.dtype).view(self._copied_from.shape))


_AS_BITS = {torch.bfloat16: torch.uint16, torch.bool: torch.uint8}


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype: "float32"."""
    return str(dtype).removeprefix("torch.")


def describe(tensor: torch.Tensor) -> str:
    """Return dtype and number of elements, which are equal on all ranks of a collective, as a text: "float32[1024]"."""
    return f"{name_of(tensor.dtype)}[{tensor.numel()}]"


class TorchReduction:
    """How torch wants values to become one.

    Args:
        op: The reduction, as torch passes it in its options or as a program names it.
        dtype: The dtype of the tensor.
        size: The number of ranks.

    Attributes:
        name: The name of the reduction, such as "SUM".

    Raises:
        UnsupportedTensorError: There is no such reduction for this dtype.
        NotYetError: The reduction does not exist here.
    """

    def __init__(self, op: Any, dtype: torch.dtype, size: int) -> None:
        kind = getattr(op, "op", op)
        self.name: str = kind.name
        self._bitwise = _BITWISE.get(kind)
        self._how: Reduction | None = None
        is_integer = not dtype.is_floating_point and not dtype.is_complex
        if self._bitwise is not None:
            if not is_integer:
                raise UnsupportedTensorError(f"{self.name} of {dtype}: expected integers or bool.")
            return
        if kind not in _OPS:
            raise NotYetError(
                f"{self.name}: the backend hvdlite has {', '.join(each.name for each in (*_OPS, *_BITWISE))}. Multiply the "
                "tensor before, and use SUM."
            )
        ours = _OPS[kind]
        if dtype not in DTYPES:
            raise UnsupportedTensorError(f"{self.name} of {dtype}: cast it to float16, bfloat16 or float32.")
        if ours is ReduceOp.AVERAGE and is_integer:
            raise UnsupportedTensorError(
                f"AVG of {dtype}: integers have no average. Use SUM, and divide as you mean it."
            )
        if dtype.is_complex and ours in (ReduceOp.MIN, ReduceOp.MAX):
            raise UnsupportedTensorError(f"{self.name} of {dtype}: complex numbers have no order.")
        if dtype is torch.bool:
            ours = _FOR_BOOL.get(ours, ours)
        self._how = reduction("uint8" if dtype is torch.bool else DTYPES[dtype], ours, size=size)

    def allreduce(self, collectives: HierarchicalCollectives, values: Array) -> None:
        """Reduce `values` over the ranks, in place."""
        if self._how is not None:
            collectives.allreduce(values, self._how)
        else:
            values[:] = self._gathered(collectives, values)

    def reduce_scatter(
        self, collectives: HierarchicalCollectives, values: Array, out: Array, counts: Sequence[int]
    ) -> None:
        """Reduce `values` over the ranks, and keep slice `rank` of ``counts[rank]`` elements in `out`."""
        if self._how is not None:
            if np.may_share_memory(values, out):
                values = values.copy()
            collectives.reduce_scatter(values, out, counts, self._how)
        else:
            start = sum(counts[: collectives.rank])
            out[:] = self._gathered(collectives, values)[start : start + out.size]

    def _gathered(self, collectives: HierarchicalCollectives, values: Array) -> Array:
        """Return the bits of all ranks, combined. Every rank gathers them all, for nobody has this for gradients."""
        assert self._bitwise is not None
        everything = np.empty(collectives.size * values.size, values.dtype)
        collectives.allgather(values, everything, [values.size] * collectives.size)
        combined: Array = self._bitwise.reduce(everything.reshape(collectives.size, -1), axis=0)
        return combined


def check_equal(what: str, got: int, expected: int) -> None:
    """Raise ArgumentError unless a number of elements is the expected one."""
    if got != expected:
        raise ArgumentError(f"{what} has {got} elements; expected {expected}.")
