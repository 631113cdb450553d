"""The place of one parameter's gradient in the reducer's memory."""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch

from hvdlite.gradients.bucket import Bucket
from hvdlite.protocols import Array
from hvdlite_torch.sync.encoded import EncodedGradient
from hvdlite_torch.tensors.adapter import ADAPTER
from hvdlite_torch.tensors.gradient import gradient_dtype
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
        bucket: Whose memory it is.
        encoded: What is exchanged in place of the gradient; None if that is itself.
        alone: There is one rank only, so that a gradient is its own result.

    Attributes:
        index, alone: As given.
        pool: The buffers of the bucket; its `number` says which of them this rank uses.
        large: The gradient is so large that copying it is worth some thought.
        compressed: Something else is exchanged in place of the gradient.
        stays: No other rank reads anything of it.
        apart: It is never at home: gradients are compressed, or lie in another order (``channels_last``), or results do not
            lie where gradients do.
        where: The gradient in the present step.
    """

    __slots__ = (
        *("_bucket", "_encoded", "_home", "_like", "_memory", "_strides", "alone", "apart"),
        *("compressed", "dtype", "index", "large", "pool", "shape", "stays", "where"),
    )

    def __init__(
        self, index: int, parameter: torch.Tensor, bucket: Bucket, encoded: EncodedGradient | None, alone: bool
    ) -> None:
        self.index = index
        self.shape, self.dtype = parameter.shape, gradient_dtype(parameter)
        self._bucket = bucket
        self.pool = bucket.pool
        self.large = index in bucket.large
        self._encoded = encoded
        self.compressed = encoded is not None
        self.alone = alone
        # The memory is in the order of the indices on every rank; torch's fused steps want gradients in the parameter's order.
        self._strides = None if parameter.is_contiguous() else torch.empty_like(parameter).stride()
        shape, dtype = (self.shape, self.dtype) if encoded is None else encoded.layout
        self._like = torch.empty(shape, dtype=dtype, device="meta")
        memory, result = self.pool.memory_of(index, 0), self.pool.result_of(index, 0)
        in_place = result is memory
        self._memory = self._tensor(memory)
        self._home = Lent(self._memory if in_place else self._tensor(result))
        self.apart = encoded is not None or self._strides is not None or not in_place
        self.stays = bucket.stays(index) and encoded is None
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
        if (
            gradient.requires_grad
            or not self._is_like(gradient)
            or not (self._encoded is None or self._encoded.codec.repeatable)
        ):
            return False
        self.load(gradient)
        return True

    def is_copy(self, gradient: torch.Tensor) -> bool:
        """Whether what was copied is still the gradient."""
        if not self._is_like(gradient):
            return False
        if self._encoded is not None:
            gradient = self._encoded.encode(gradient)
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

    def show(self, gradient: torch.Tensor | None) -> None:
        """Let a gradient that `stays` be summed where it is; in the reducer's memory, if None."""
        flat = None if gradient is None else ADAPTER.to_array(gradient.view(-1), wide=False)
        self._bucket.place(self.index, flat)

    def load(self, gradient: torch.Tensor) -> None:
        """Copy a gradient to where it is expected."""
        if self._encoded is not None:
            gradient = self._encoded.encode(gradient)
        self.source().copy_(gradient)

    def source(self) -> torch.Tensor:
        """Where the gradient is expected."""
        number = self.pool.number
        return self._tensor(self.pool.memory_of(self.index, number)) if number else self._memory

    # After it

    def result(self) -> torch.Tensor:
        """The combined gradient as it lies in the reducer's memory."""
        number = self.pool.number
        return self._tensor(self.pool.result_of(self.index, number)) if number else self._home.tensor

    def _decoded(self) -> torch.Tensor:
        result = self.result()
        return result if self._encoded is None else self._encoded.decode(result)

    def give(self, parameter: torch.Tensor) -> None:
        """Let ``parameter.grad`` be the combined gradient, which is there for some rank."""
        gradient, buffer = parameter.grad, self.pool.number
        if self.where is Where.OWN or (self.where is Where.HOME and not buffer):
            return
        if self.where is Where.HOME and gradient is not None:
            gradient.copy_(self.result())
            return
        may_be_home = not buffer and self._encoded is None and self._strides is None
        # Nobody sees where it is, or nobody is to see the result there.
        if may_be_home and (
            gradient is None or not self._is_like(gradient) or is_exclusive(gradient) or is_borrowed(gradient)
        ):
            parameter.grad = None  # whose layout may be another
            parameter.grad = self._home.lend()
            return
        if gradient is None and self._strides is not None:
            gradient = parameter.grad = torch.empty_strided(self.shape, self._strides, dtype=self.dtype)
        write(parameter, gradient, self._decoded())

    def settle(self, parameter: torch.Tensor) -> None:
        """Give a gradient memory of its own if another one was written over the combined one since."""
        result = self._decoded()
        if parameter.grad is not None and not same_bits(parameter.grad.contiguous(), result.contiguous()):
            parameter.grad = result.clone()


def as_tensor(memory: Array, like: torch.Tensor) -> torch.Tensor:
    """Flat memory of the reducer as a tensor of the dtype and shape of `like`."""
    return torch.from_numpy(memory).view(like.dtype).view(like.shape)


Check = Callable[[Slot, torch.Tensor], torch.Tensor | None]
"""Returns a gradient as it can be exchanged; or None if it cannot be a dense one."""
