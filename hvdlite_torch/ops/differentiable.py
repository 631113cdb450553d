"""How an exchange becomes a function that autograd can differentiate.

The gradient of an exchange is an exchange too, so every rank must run its backward pass. It is made of differentiable
exchanges in turn, so gradients of gradients are right as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite.adapter.arguments import as_list
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_torch.tensors.adapter import ADAPTER

Tensors = list[torch.Tensor]
Exchange = Callable[[Tensors], Tensors]


class _Differentiable(torch.autograd.Function):
    """An exchange of tensors whose gradient is `backward` of the gradients of its results."""

    @staticmethod
    def forward(ctx: Any, forward: Exchange, backward: Exchange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.backward_of_results = backward
        return tuple(forward(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.backward_of_results([gradient.contiguous() for gradient in gradients]))


class _InPlace(torch.autograd.Function):
    """As `_Differentiable`, of an exchange that overwrites the tensors."""

    @staticmethod
    def forward(ctx: Any, forward: Exchange, backward: Exchange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.backward_of_results = backward
        ctx.mark_dirty(*tensors)
        forward(list(tensors))
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.backward_of_results([gradient.contiguous() for gradient in gradients]))


def _is_recorded(tensor: Any) -> bool:
    """Whether autograd will go through a tensor, on its way to those that it was made of."""
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf


def overwriting(given: Any, forward: Exchange, backward: Exchange) -> Any:
    """Exchange one tensor or a list of them in place, as a change in place for autograd.

    Parameters, and other tensors that require a gradient and were not made of others, are overwritten as under
    ``torch.no_grad()``: that is what Horovod's programs do with them.

    Args:
        given, forward, backward: As in `differentiable`.

    Returns:
        `given`, or a list of what is in it.
    """
    tensors = as_list(given)
    if torch.is_grad_enabled() and any(map(_is_recorded, tensors)):
        seen = [tensor if _is_recorded(tensor) else tensor.detach() for tensor in tensors]
        _InPlace.apply(forward, backward, *seen)  # type: ignore[no-untyped-call]
    else:
        forward(tensors)
    return tensors if isinstance(given, list | tuple) else given


def overwritten_later(given: Any) -> Any:
    """Let tensors pass that an exchange under way will overwrite.

    Raises:
        UnsupportedTensorError: Autograd goes through one of them, and would take no notice.
    """
    for tensor in as_list(given):
        if torch.is_grad_enabled() and _is_recorded(tensor):
            raise UnsupportedTensorError(
                f"autograd has recorded how this tensor of shape {tuple(tensor.shape)} was made, and an asynchronous operation "
                "that overwrites it cannot be recorded: use the blocking form, or tensor.detach() if no gradient is to go "
                "through it."
            )
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            ADAPTER.touch(tensor)  # who needs the values of now must not use it any more
    return given


def differentiable(
    given: Any,
    forward: Exchange,
    backward: Exchange,
    compression: Compressor = Compression.none,
) -> Any:
    """Exchange one tensor or a list of them; recorded by autograd only where something wants a gradient.

    Args:
        given: A tensor, or a list or tuple of tensors.
        forward: The exchange.
        backward: From the gradients of the results to those of the tensors, by differentiable functions.
        compression: How the tensors travel, and the gradients too: autograd goes through the compressor's own operations.

    Returns:
        The result, or a list of results.

    Raises:
        ArgumentError: `compression` cannot compress.
    """
    if not callable(getattr(compression, "compress", None)):
        raise ArgumentError(
            f"compression={compression!r}: expected hvd.Compression.none, fp16 or bf16, or what has compress and decompress."
        )
    pairs = [compression.compress(tensor) for tensor in as_list(given)]
    tensors = [tensor for tensor, _ in pairs]
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        results: Sequence[torch.Tensor] = _Differentiable.apply(forward, backward, *tensors)  # type: ignore[no-untyped-call]
    else:
        results = forward(tensors)
    whole = [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]
    return whole if isinstance(given, list | tuple) else whole[0]
