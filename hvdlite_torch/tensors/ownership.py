"""Ownership of a gradient's memory: whether only the parameter uses the memory, or the program too.

A program may hold a gradient by a reference, a view, ``detach()``, NumPy, DLPack, a flat buffer that contains it, or as the
gradient of another parameter. Each of these is counted by Python (references to the tensor object), by torch's tensor behind
that object, or by the storage, so these three counts are enough. The version counter is not: changes through ``.data`` and
NumPy do not increase it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch

_storage_uses = torch._C._storage_Use_Count
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def uses_of_storage(tensor: torch.Tensor) -> int:
    """Return how many tensors, and objects made of tensors, use a tensor's storage, plus one for this call."""
    return int(_storage_uses(tensor.untyped_storage()._cdata))


def _users(gradient: torch.Tensor) -> tuple[int, int, int]:
    return gradient._use_count(), sys.getrefcount(gradient), uses_of_storage(gradient)  # type: ignore[attr-defined]


@functools.cache
def _parameter_only() -> tuple[int, int, int]:
    """Return the counts of `_users` for a gradient that its parameter and two local variables hold. torch's version matters."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)

    def count() -> tuple[int, int, int]:
        gradient = parameter.grad
        assert gradient is not None
        return _count(gradient)

    return count()


def _count(gradient: torch.Tensor) -> tuple[int, int, int]:
    return _users(gradient)


def is_exclusive(gradient: torch.Tensor) -> bool:
    """Return whether only the parameter uses a gradient's memory. The caller must hold it in one local variable only."""
    # Memory that is not torch's own, such as a NumPy array's, may have users that torch does not know.
    return _users(gradient) == _parameter_only() and gradient.untyped_storage().resizable()


def is_storage_shared(gradient: torch.Tensor) -> bool:
    """Return whether another tensor, or an object made of another tensor, uses a gradient's memory."""
    return uses_of_storage(gradient) > _parameter_only()[2]


class Lent:
    """A tensor whose memory the program gets by `lend`, and gives back by dropping it.

    Args:
        tensor: A tensor that has its storage for itself.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self._storage = tensor.untyped_storage()._cdata
        self._own_uses = _storage_uses(self._storage)

    def lend(self) -> torch.Tensor:
        """Return a new tensor object for the same memory. The program may detach it in place, or give it other memory."""
        return self.tensor.data

    @property
    def is_only_here(self) -> bool:
        """Whether the program holds the memory by exactly one tensor from `lend`, and by nothing else."""
        return int(_storage_uses(self._storage)) == self._own_uses + 1

    @property
    def is_held(self) -> bool:
        """Whether the program still holds the memory, or has moved its storage (``share_memory_()``)."""
        return _storage_uses(self._storage) != self._own_uses or self.tensor.data_ptr() != self.address


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie one after the other in memory, with their values as stored."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two plain tensors of one dtype and shape are equal bit for bit. Other threads can run meanwhile."""
    return bool(_compare(one.data_ptr(), other.data_ptr(), one.numel() * one.element_size()) == 0)


def write(parameter: torch.Tensor, gradient: torch.Tensor | None, result: torch.Tensor) -> None:
    """Copy a result to ``parameter.grad``: into the memory that it has, so that all users of that memory see the result.

    The gradient gets new memory if it has none, or if the backward pass used memory that is not its own: a constant that a hook
    returned, or the gradient of another parameter.

    Args:
        parameter: The parameter.
        gradient: ``parameter.grad``.
        result: The values to copy.
    """
    if gradient is not None and not is_borrowed(gradient):
        try:
            gradient.copy_(result)
        except RuntimeError:  # the gradient is expanded (its elements share memory), or an inference tensor
            pass
        else:
            return
    if gradient is not None and gradient.layout is not torch.strided:
        parameter.grad = None  # torch does not replace a gradient by one of another layout
    parameter.grad = result.clone()


def is_borrowed(gradient: torch.Tensor) -> bool:
    """Return whether a gradient's memory may belong to somebody else.

    That is so if the gradient is sparse or part of a graph, or if it shares its memory and has not been written to since the
    backward pass.
    """
    if gradient.layout is not torch.strided or gradient.requires_grad:
        return True
    return gradient._version == 0 and not gradient._is_view() and is_storage_shared(gradient)


def is_any_borrowed(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether any gradient `is_borrowed`. None is sparse. Of thousands, most are asked for two facts only."""
    alone, uses = _parameter_only()[2], _storage_uses
    return any(
        [
            (gradient.requires_grad or uses(gradient.untyped_storage()._cdata) > alone) and is_borrowed(gradient)
            for gradient in gradients
        ]
    )


def overlapping(tensors: Sequence[torch.Tensor], nbytes: Sequence[int]) -> set[int]:
    """Return the indices of the tensors that may share memory with another one of them.

    Args:
        tensors: Dense tensors in host memory.
        nbytes: The number of bytes of each tensor's elements.
    """
    starts = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
    spread = [number for number, tensor in enumerate(tensors) if not tensor.is_contiguous()]
    ends = starts + np.array(nbytes, np.int64)
    for number in spread:
        ends[number] = starts[number] + _extent(tensors[number])
    order = np.argsort(starts)
    reach = np.maximum.accumulate(ends[order])
    late = order[1:][starts[order][1:] < reach[:-1]]
    return set(_all_that_meet(late.tolist(), starts, ends))


def _all_that_meet(late: Sequence[int], starts: np.ndarray, ends: np.ndarray) -> Iterator[int]:
    for number in late:
        yield from np.flatnonzero((starts < ends[number]) & (ends > starts[number])).tolist()


def _extent(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
