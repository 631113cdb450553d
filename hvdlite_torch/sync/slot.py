"""The place of one parameter's gradient in the reducer's memory."""

from __future__ import annotations

import enum
from typing import Any

import torch

from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.gradients.reducer import Reducer
from hvdlite.protocols import Array
from hvdlite_torch.step.codec import Codec
from hvdlite_torch.tensors.ownership import Lent, is_borrowed, is_exclusive, is_plain, same_bits, write


class Where(enum.Enum):
    """Where a gradient is: see `Slot`."""

    NOWHERE = enum.auto()
    HOME = enum.auto()
    OWN = enum.auto()
    AWAY = enum.auto()


class Slot:
    """Where the gradient of one parameter goes.

    What is in ``parameter.grad`` when the optimizer steps is exchanged, however it came there. It is one of these (`Where`):

    - *home*: memory of the reducer, given to the program whole, so that whatever it does in place counts;
    - *own*: memory of autograd's that nobody else sees, where no other rank reads anything of it: it is summed there;
    - *away*: anything else. It is copied by the step, and the result is written to where it is if the program may see that.

    Args:
        index: The parameter's number.
        parameter: Its shape and dtype are those of gradients.
        reducer: Whose memory it is.
        codec: How gradients are compressed; None if they are not.
        alone: There is one rank only, so that a gradient is its own result.

    Attributes:
        alone: As given.
        compressed: There is a codec.
        stays: No other rank reads anything of it.
        apart: It is never at home: gradients are compressed, or lie in another order (``channels_last``), or results do not
            lie where gradients do.
        where: The gradient in the present step.
    """

    __slots__ = (
        *("_codec", "_context", "_home", "_like", "_memory", "_reducer", "_strides", "alone", "apart"),
        *("compressed", "dtype", "index", "shape", "stays", "where"),
    )

    def __init__(self, index: int, parameter: torch.Tensor, reducer: Reducer, codec: Codec | None, alone: bool) -> None:
        self.index = index
        self.shape, self.dtype = parameter.shape, gradient_dtype(parameter)
        self._reducer = reducer
        self._codec = codec
        self.compressed = codec is not None
        self.alone = alone
        # The memory is in the order of the indices on every rank; torch's fused steps want gradients in the parameter's order.
        self._strides = None if parameter.is_contiguous() else torch.empty_like(parameter).stride()
        self._like, self._context = _like(parameter, codec)
        self._like = self._like.detach().to("meta")
        self._memory = self._tensor(reducer.memory_of(index))
        in_place = reducer.result_of(index) is reducer.memory_of(index)
        self._home = Lent(self._memory if in_place else self._tensor(reducer.result_of(index)))
        self.apart = codec is not None or self._strides is not None or not in_place
        self.stays = reducer.stays(index) and codec is None
        self.where = Where.NOWHERE

    def _tensor(self, memory: Array) -> torch.Tensor:
        return as_tensor(memory, self._like)

    # During a backward pass

    def take(self, parameter: torch.Tensor) -> None:
        """Bring the gradient home, while it is in the cache, if nobody but the parameter sees where it is."""
        gradient = parameter.grad
        if (
            gradient is not None
            and self._is_like(gradient)
            and gradient.data_ptr() != self._home.address
            and not (gradient.requires_grad or gradient._is_view())
            and is_exclusive(gradient)
            and not self._home.is_held
        ):
            self._memory.copy_(gradient)
            parameter.grad = self._home.lend()

    def copy(self, gradient: torch.Tensor) -> bool:
        """Copy a gradient that may be exchanged before the step. Returns whether it may be: not if it is part of a graph."""
        if gradient.requires_grad or not self._is_like(gradient) or not (self._codec is None or self._codec.repeatable):
            return False
        self.load(gradient, 0)
        return True

    def is_copy(self, gradient: torch.Tensor) -> bool:
        """Whether what was copied is still the gradient."""
        if not self._is_like(gradient):
            return False
        if self._codec is not None:
            gradient, _ = self._codec.encode(gradient)
        if not is_plain(gradient):
            gradient = torch.empty_like(self._memory).copy_(gradient)
        return same_bits(gradient, self._memory)

    def _is_like(self, gradient: torch.Tensor) -> bool:
        return gradient.layout is torch.strided and gradient.dtype is self.dtype and gradient.shape == self.shape

    def leave(self, parameter: torch.Tensor) -> None:
        """Let the gradient have memory of its own, if it is at home and the program does not hold it: this slot is given up."""
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        if gradient.data_ptr() == self._home.address and self._home.is_only_here:
            parameter.grad = gradient.clone()

    # Before an exchange

    def find(self, parameter: torch.Tensor) -> bool:
        """See where the gradient is. Returns whether the result cannot be put at home, for the program holds what is there."""
        gradient = parameter.grad
        if gradient is None:
            self.where = Where.NOWHERE
        elif not self._is_like(gradient):
            self.where = Where.AWAY
        elif self.alone:
            self.where = Where.OWN
            return False
        elif not is_plain(gradient) or gradient.requires_grad:
            self.where = Where.AWAY
        elif not self.apart and gradient.data_ptr() == self._home.address:
            self.where = Where.HOME
            return False
        elif self.stays and is_exclusive(gradient):
            self.where = Where.OWN
            return False
        else:
            self.where = Where.AWAY
        return self._home.is_held

    @property
    def is_held(self) -> bool:
        """Whether the program holds what is at home."""
        return self._home.is_held

    def load(self, gradient: torch.Tensor, room: int) -> None:
        """Copy a gradient to where it is expected."""
        if self._codec is not None:
            gradient, self._context = self._codec.encode(gradient)
        self.source(room).copy_(gradient)

    def source(self, room: int) -> torch.Tensor:
        """Where the gradient is expected, if this rank uses the room of this number."""
        return self._tensor(self._reducer.memory_of(self.index, room)) if room else self._memory

    def dense(self, gradient: torch.Tensor, sparse_as_dense: bool) -> torch.Tensor | None:
        """See `as_dense`."""
        return as_dense(gradient, self.shape, self.dtype, sparse_as_dense)

    # After it

    def result(self, room: int) -> torch.Tensor:
        """The combined gradient as it lies in the reducer's memory."""
        return self._tensor(self._reducer.result_of(self.index, room)) if room else self._home.tensor

    def _decoded(self, room: int) -> torch.Tensor:
        result = self.result(room)
        return result if self._codec is None else self._codec.decode(result, self._context)

    def give(self, parameter: torch.Tensor, room: int) -> None:
        """Let ``parameter.grad`` be the combined gradient, which is there for some rank."""
        gradient = parameter.grad
        if self.where is Where.OWN or (self.where is Where.HOME and not room):
            return
        if self.where is Where.HOME and gradient is not None:
            gradient.copy_(self.result(room))
            return
        may_be_home = not room and self._codec is None and self._strides is None
        # Nobody sees where it is, or nobody is to see the result there.
        if may_be_home and (
            gradient is None or not self._is_like(gradient) or is_exclusive(gradient) or is_borrowed(gradient)
        ):
            parameter.grad = None  # whose layout may be another
            parameter.grad = self._home.lend()
            return
        if gradient is None and self._strides is not None:
            gradient = parameter.grad = torch.empty_strided(self.shape, self._strides, dtype=self.dtype)
        write(parameter, gradient, self._decoded(room))

    def settle(self, parameter: torch.Tensor, room: int) -> None:
        """Give a gradient memory of its own if another one was written over the combined one since."""
        result = self._decoded(room)
        if parameter.grad is not None and not same_bits(parameter.grad.contiguous(), result.contiguous()):
            parameter.grad = result.clone()


def as_dense(
    gradient: torch.Tensor, shape: torch.Size, dtype: torch.dtype, sparse_as_dense: bool
) -> torch.Tensor | None:
    """A gradient as a dense one; None if it is sparse and is to stay so.

    Args:
        gradient: As backward left it.
        shape, dtype: Of the parameter, when the optimizer was made distributed.
        sparse_as_dense: What is sparse is not to stay so.

    Raises:
        UnsupportedTensorError: It cannot be exchanged at all.
        ArgumentError: It is not like the parameter once was.
    """
    if gradient.layout is not torch.strided:
        if gradient.layout is not torch.sparse_coo:
            raise UnsupportedTensorError(
                f"a gradient of layout {gradient.layout} for a parameter of shape {tuple(shape)}: expected a dense "
                "one, or one of layout torch.sparse_coo."
            )
        if not sparse_as_dense:
            return None
        gradient = gradient.to_dense()
    if gradient.shape != shape or gradient.dtype is not dtype:
        raise ArgumentError(
            f"a parameter of {dtype} and shape {tuple(shape)} has become one of {gradient.dtype} and shape "
            f"{tuple(gradient.shape)} since the optimizer was made distributed: change models before that."
        )
    return gradient


def wire_tensor(parameter: torch.Tensor, codec: Codec | None) -> torch.Tensor:
    """A tensor like those that are exchanged for the gradients of a parameter."""
    return _like(parameter, codec)[0]


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's gradients, which may be another one since torch 2.9 (``grad_dtype``)."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _like(parameter: torch.Tensor, codec: Codec | None) -> tuple[torch.Tensor, Any]:
    dtype = gradient_dtype(parameter)
    if codec is not None:
        return codec.encode(torch.zeros_like(parameter, dtype=dtype, requires_grad=False))
    return (parameter if parameter.dtype is dtype else torch.empty_like(parameter, dtype=dtype)), None


def as_tensor(memory: Array, like: torch.Tensor) -> torch.Tensor:
    """Flat memory of the reducer as a tensor of the dtype and shape of `like`."""
    return torch.from_numpy(memory).view(like.dtype).view(like.shape)
