"""`Slot`: where the gradient of one parameter lies, and how it comes to the reducer's memory and back."""

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


class GradientPlace(enum.Enum):
    """Where a gradient is before an exchange: see `Slot`."""

    NOWHERE = enum.auto()
    IN_BUFFER = enum.auto()
    IN_PLACE = enum.auto()
    ELSEWHERE = enum.auto()


class Slot:
    """Where the gradient of one parameter lies.

    The step combines what is in ``parameter.grad``, however it came there. The gradient is at one of these places:

    - *in the buffer*: in memory of the reducer, which the program was given. So each change that it makes in place counts.
    - *in place*: in memory of autograd that nobody else sees, and that no other rank reads. The gradient is summed there.
    - *elsewhere*: anywhere else. The step copies it, and writes the result back to it if the program may see that memory.

    Args:
        index: The number of the parameter.
        parameter: Gradients have its shape, and its dtype or ``grad_dtype``.
        bucket: The bucket whose memory the slot is a part of.
        encoded: The compressed gradient that travels instead; None if gradients are not compressed.
        alone: Whether there is one rank only, so that a gradient is its own result.

    Attributes:
        pool: The buffers of the bucket; its `number` says which of them this rank uses.
        large: Whether the gradient is so large that avoiding a copy pays.
        compressed: Whether a compressed gradient travels instead.
        reduced_in_place: Whether no other rank reads anything of the gradient.
        apart: Whether the gradient is never in the buffer: it is compressed, or has other strides than the flat memory
            (``channels_last``), or results do not lie where gradients do.
        where: Where the gradient of the present step is.
    """

    __slots__ = (
        *("_bucket", "_encoded", "_home", "_like", "_memory", "_strides", "alone", "apart"),
        *("compressed", "dtype", "index", "large", "pool", "shape", "reduced_in_place", "where"),
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
        # Flat memory is in C order on every rank; torch's fused steps need gradients with the parameter's strides.
        self._strides = None if parameter.is_contiguous() else torch.empty_like(parameter).stride()
        shape, dtype = (self.shape, self.dtype) if encoded is None else encoded.layout
        self._like = torch.empty(shape, dtype=dtype, device="meta")
        memory, result = self.pool.memory_of(index, 0), self.pool.result_of(index, 0)
        in_place = result is memory
        self._memory = self._tensor(memory)
        self._home = Lent(self._memory if in_place else self._tensor(result))
        self.apart = encoded is not None or self._strides is not None or not in_place
        self.reduced_in_place = bucket.reduces_in_place(index) and encoded is None
        self.where = GradientPlace.NOWHERE

    def _tensor(self, memory: Array) -> torch.Tensor:
        return as_tensor(memory, self._like)

    # During a backward pass

    def take(self, parameter: torch.Tensor) -> None:
        """Copy the gradient home while it is in the cache, and set ``p.grad`` to the copy, if only ``p`` refers to it."""
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
        """Copy a gradient that may be exchanged before the step. Return whether it was copied.

        A gradient is not copied if it is a part of a graph or not dense, or if its compressor remembers what it has seen.
        """
        if (
            gradient.requires_grad
            or not self._is_like(gradient)
            or not (self._encoded is None or self._encoded.codec.repeatable)
        ):
            return False
        self.load(gradient)
        return True

    def is_copy(self, gradient: torch.Tensor) -> bool:
        """Return whether the copy still equals the gradient, bit for bit."""
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
        """Give the gradient memory of its own, if it is at home and the program does not hold it: this slot is given up."""
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        if gradient.data_ptr() == self._home.address and self._home.is_only_here:
            parameter.grad = gradient.clone()

    # Before an exchange

    def find(self, parameter: torch.Tensor) -> bool:
        """Find out where the gradient is.

        Returns:
            Whether the result cannot be put at home, because the program holds a view of that memory.
        """
        gradient = parameter.grad
        if gradient is None:
            self.where = GradientPlace.NOWHERE
        elif not self._is_like(gradient):
            self.where = GradientPlace.ELSEWHERE
        elif self.alone:
            self.where = GradientPlace.IN_PLACE
            return False
        elif not is_plain(gradient) or gradient.requires_grad:
            self.where = GradientPlace.ELSEWHERE
        elif not self.apart and gradient.data_ptr() == self._home.address:
            self.where = GradientPlace.IN_BUFFER
            return False
        elif self.reduced_in_place and is_exclusive(gradient):
            self.where = GradientPlace.IN_PLACE
            return False
        else:
            self.where = GradientPlace.ELSEWHERE
        return self._home.is_held

    @property
    def is_held(self) -> bool:
        """Whether the program holds a view of the memory at home."""
        return self._home.is_held

    def show(self, gradient: torch.Tensor | None) -> None:
        """Let a gradient that is `reduced_in_place` be summed where it lies; in the reducer's memory, if `gradient` is None."""
        flat = None if gradient is None else ADAPTER.to_array(gradient.view(-1), wide=False)
        self._bucket.place(self.index, flat)

    def load(self, gradient: torch.Tensor) -> None:
        """Copy a gradient to the reducer's memory."""
        if self._encoded is not None:
            gradient = self._encoded.encode(gradient)
        self.source().copy_(gradient)

    def source(self) -> torch.Tensor:
        """Return the reducer's memory for this rank's gradient, as a tensor of the gradient's shape and dtype."""
        number = self.pool.number
        return self._tensor(self.pool.memory_of(self.index, number)) if number else self._memory

    # After an exchange

    def result(self) -> torch.Tensor:
        """Return the combined gradient as it lies in the reducer's memory. A compressed one is still compressed."""
        number = self.pool.number
        return self._tensor(self.pool.result_of(self.index, number)) if number else self._home.tensor

    def _decoded(self) -> torch.Tensor:
        result = self.result()
        return result if self._encoded is None else self._encoded.decode(result)

    def give(self, parameter: torch.Tensor) -> None:
        """Set ``parameter.grad`` to the combined gradient, which lies elsewhere. Some rank has a gradient of the parameter."""
        gradient, buffer = parameter.grad, self.pool.number
        if self.where is GradientPlace.IN_BUFFER and gradient is not None:
            gradient.copy_(self.result())
            return
        may_be_home = not buffer and self._encoded is None and self._strides is None
        # The program does not see the gradient's memory, or must not see the result there.
        if may_be_home and (
            gradient is None or not self._is_like(gradient) or is_exclusive(gradient) or is_borrowed(gradient)
        ):
            parameter.grad = None  # the present gradient may have another layout
            parameter.grad = self._home.lend()
            return
        if gradient is None and self._strides is not None:
            gradient = parameter.grad = torch.empty_strided(self.shape, self._strides, dtype=self.dtype)
        write(parameter, gradient, self._decoded())

    def separate(self, parameter: torch.Tensor) -> None:
        """Give the gradient memory of its own if another gradient was written over it, in memory that both share."""
        result = self._decoded()
        if parameter.grad is not None and not same_bits(parameter.grad.contiguous(), result.contiguous()):
            parameter.grad = result.clone()


def as_tensor(memory: Array, like: torch.Tensor) -> torch.Tensor:
    """Return flat memory of the reducer as a tensor with the dtype and shape of `like`. The tensor shares the memory."""
    return torch.from_numpy(memory).view(like.dtype).view(like.shape)


Check = Callable[[Slot, torch.Tensor], torch.Tensor | None]
"""Returns a gradient as a dense one; None if it is sparse and stays so."""
