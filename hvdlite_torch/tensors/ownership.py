"""Who sees the memory of a gradient: its parameter alone, or the program too.

A program may hold a gradient by a reference, a view, ``detach()``, NumPy, DLPack, a flat buffer that it is a part of, or as the
gradient of another parameter. Each of these counts as a user of the tensor object, of torch's tensor behind it, or of the
storage. No trace of its own is needed, and a version does not tell: ``.data`` and NumPy do not count.
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
    """How many tensors, and things made of them, have a tensor's memory; one more, for this question."""
    return int(_storage_uses(tensor.untyped_storage()._cdata))


def _users(gradient: torch.Tensor) -> tuple[int, int, int]:
    return gradient._use_count(), sys.getrefcount(gradient), uses_of_storage(gradient)  # type: ignore[attr-defined]


@functools.cache
def _parameter_only() -> tuple[int, int, int]:
    """What `_users` counts for a gradient that only its parameter and two local variables refer to, whatever torch this is."""
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
    """Whether nothing but the parameter sees a gradient's memory. The caller has it in one local variable, and nowhere else."""
    # What is not torch's own memory, but that of a NumPy array for example, has users that torch does not know.
    return _users(gradient) == _parameter_only() and gradient.untyped_storage().resizable()


def is_storage_shared(gradient: torch.Tensor) -> bool:
    """Whether another tensor, or something made of one, has a gradient's memory."""
    return uses_of_storage(gradient) > _parameter_only()[2]


class Lent:
    """A tensor whose memory is given to the program, by `lend`, and is wanted back.

    Args:
        tensor: Of a storage of its own.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self._storage = tensor.untyped_storage()._cdata
        self._own_uses = _storage_uses(self._storage)

    def lend(self) -> torch.Tensor:
        """Another tensor object for the same memory: the program may give that other memory, or detach it in place."""
        return self.tensor.data

    @property
    def is_only_here(self) -> bool:
        """Whether one tensor that `lend` has given, and nothing else, is there of it."""
        return int(_storage_uses(self._storage)) == self._own_uses + 1

    @property
    def is_held(self) -> bool:
        """Whether the program still holds any of it, or has moved its storage (``share_memory_()``)."""
        return _storage_uses(self._storage) != self._own_uses or self.tensor.data_ptr() != self.address


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements lie one after the other, as they are."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two plain tensors of one dtype and shape hold the same, bit for bit. Other threads run meanwhile."""
    return bool(_compare(one.data_ptr(), other.data_ptr(), one.numel() * one.element_size()) == 0)


def write(parameter: torch.Tensor, gradient: torch.Tensor | None, result: torch.Tensor) -> None:
    """Let ``parameter.grad`` be a result: in the memory where it is, so that whoever sees that sees the result.

    New memory is taken where there is none, or where a backward pass took memory that is somebody else's: a constant that a
    hook returned, or the gradient that another parameter got too.

    Args:
        parameter, gradient: ``gradient`` is ``parameter.grad``.
        result: Is copied.
    """
    if gradient is not None and not is_borrowed(gradient):
        try:
            gradient.copy_(result)
        except RuntimeError:  # its elements share memory, or it was made for inference
            pass
        else:
            return
    if gradient is not None and gradient.layout is not torch.strided:
        parameter.grad = None  # whose layout is another
    parameter.grad = result.clone()


def is_borrowed(gradient: torch.Tensor) -> bool:
    """Whether a gradient is a part of a graph, or nobody has written to its memory since a backward pass took it."""
    if gradient.layout is not torch.strided or gradient.requires_grad:
        return True
    return gradient._version == 0 and not gradient._is_view() and is_storage_shared(gradient)


def overlapping(tensors: Sequence[torch.Tensor], nbytes: Sequence[int]) -> set[int]:
    """The numbers of those tensors that (may) share memory with another one of them.

    Args:
        tensors: Dense, in host memory.
        nbytes: The bytes of their elements.
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
