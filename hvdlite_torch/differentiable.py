"""How an exchange becomes a function that autograd can differentiate.

The gradient of an exchange is an exchange too, so every rank must run its backward pass. It is made of differentiable
exchanges in turn, so gradients of gradients are right as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite.arguments import as_list
from hvdlite.compression import Compression, Compressor
from hvdlite.errors import ArgumentError

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
