"""The place of one parameter's gradient in the reducer's memory."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.compression import Compressor
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import Array
from hvdlite.reducer import Reducer


class Codec:
    """What gradients become before they are exchanged, and afterwards.

    Args:
        compressor: Makes them smaller.
        divisor: Gradients are divided by it before they are compressed, and multiplied by it afterwards, so that sums stay
            within the range of a small dtype.

    Attributes:
        compressor, divisor: As given.
    """

    def __init__(self, compressor: Compressor, divisor: float) -> None:
        self.compressor = compressor
        self.divisor = divisor

    def encode(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A gradient as it is exchanged, and what `decode` needs."""
        encoded, context = self.compressor.compress(gradient if self.divisor == 1.0 else gradient / self.divisor)
        return encoded, context

    def decode(self, result: torch.Tensor, context: Any) -> torch.Tensor:
        """A combined gradient as the optimizer wants it."""
        decoded: torch.Tensor = self.compressor.decompress(result, context)
        return decoded if self.divisor == 1.0 else decoded * self.divisor


class Slot:
    """Where the gradient of one parameter goes.

    Args:
        index: The parameter's number.
        parameter: Its shape and dtype are those of gradients.
        reducer: Whose memory it is.
        codec: How gradients are compressed; None if they are not.

    Attributes:
        memory: What other ranks read of it.
        result: Where the combined gradient is; `memory` itself if the exchange is in place.
        start, stop: The elements that only this rank reads. Of a large gradient they are not copied.
        stays: All of them are, and are combined where they are.
        apart: ``p.grad`` is never memory of the reducer: gradients are compressed, or lie in another order (``channels_last``).
        gradient: One that stays where backward left it, until the exchange; and its version when others could read it.
    """

    __slots__ = (
        *("_codec", "_context", "_strides", "apart", "dtype", "gradient", "index", "memory", "parameter_address"),
        *("result", "shape", "start", "stays", "stop", "version"),
    )

    def __init__(self, index: int, parameter: torch.Tensor, reducer: Reducer, codec: Codec | None) -> None:
        self.index = index
        self.shape, self.dtype = parameter.shape, parameter.dtype
        self._codec = codec
        # The memory is in the order of the indices on every rank; torch's fused steps want gradients in the parameter's order.
        self._strides = None if parameter.is_contiguous() else torch.empty_like(parameter).stride()
        self.apart = codec is not None or self._strides is not None
        like, self._context = _like(parameter, codec)
        self.memory = as_tensor(reducer.memory_of(index), like)
        result = reducer.result_of(index)
        self.result = self.memory if result is reducer.memory_of(index) else as_tensor(result, like)
        self.start, self.stop = (0, 0) if self.apart else reducer.part_of(index)
        self.stays = self.start < self.stop and reducer.stays(index)
        self.parameter_address = parameter.data_ptr()
        self.gradient: torch.Tensor | None = None
        self.version = 0

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Put where others can read it what they read of the gradient that backward has left in ``parameter.grad``."""
        if self.apart or (self.start < self.stop and self._is_plain(gradient)):
            self.show(gradient)
        else:
            self.memory.copy_(gradient)
            self.version = self.memory._version
            parameter.grad = self.memory

    def _is_plain(self, gradient: torch.Tensor) -> bool:
        """Whether the exchange may read a gradient's elements, and write the result, where they are."""
        in_result = gradient.data_ptr() == self.result.data_ptr()  # the exchange overwrites it
        return gradient.is_contiguous() and not (in_result or gradient.is_conj() or gradient.is_neg())

    def show(self, gradient: torch.Tensor) -> None:
        """Copy what others read of a gradient; the rest stays where it is."""
        if self.apart:
            self.load(gradient)
        else:
            flat, memory = gradient.view(-1), self.memory.view(-1)
            if self.start > 0:
                memory[: self.start].copy_(flat[: self.start])
            if self.stop < flat.numel():
                memory[self.stop :].copy_(flat[self.stop :])
        self.gradient, self.version = gradient, gradient._version

    def load(self, gradient: torch.Tensor) -> None:
        """Copy all of a gradient."""
        if self._codec is not None:
            gradient, self._context = self._codec.encode(gradient)
        self.memory.copy_(gradient)

    def dense(self, gradient: torch.Tensor, sparse_as_dense: bool) -> torch.Tensor | None:
        """See `as_dense`."""
        return as_dense(gradient, self.shape, self.dtype, sparse_as_dense)

    def own_part(self) -> torch.Tensor:
        """The elements of `gradient` that were not copied."""
        assert self.gradient is not None
        return self.gradient.view(-1)[self.start : self.stop]

    def combined(self) -> torch.Tensor:
        """The combined gradient, after an exchange."""
        if self.stays and self.gradient is not None:
            return self.gradient
        result = self.result if self._codec is None else self._codec.decode(self.result, self._context)
        if self._strides is None:
            return result
        return torch.empty_strided(self.shape, self._strides, dtype=self.dtype).copy_(result)


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


def _like(parameter: torch.Tensor, codec: Codec | None) -> tuple[torch.Tensor, Any]:
    return (parameter, None) if codec is None else codec.encode(torch.zeros_like(parameter, requires_grad=False))


def as_tensor(memory: Array, like: torch.Tensor) -> torch.Tensor:
    """Flat memory of the reducer as a tensor of the dtype and shape of `like`."""
    return torch.from_numpy(memory).view(like.dtype).view(like.shape)
