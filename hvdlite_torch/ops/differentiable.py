"""Exchanges as functions that autograd can differentiate.

The gradient of an exchange is an exchange too, so every rank must run its backward pass. The gradient consists of
differentiable exchanges, so gradients of gradients are right as well.
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
    """An exchange that overwrites its tensors, and whose gradient is `backward` of the gradients of its results."""

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
    """Return whether autograd will go through a tensor to the tensors that it was computed from."""
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and not tensor.is_leaf


def _needs_gradient(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any([isinstance(t, torch.Tensor) and t.requires_grad for t in tensors])


def overwriting(given: Any, forward: Exchange, backward: Exchange) -> Any:
    """Overwrite one tensor or a list of tensors with the results of an exchange, which autograd records as a change in place.

    Leaf tensors that require a gradient, such as parameters, are overwritten as under ``torch.no_grad()``: programs for Horovod
    do that with them.

    Args:
        given: A tensor, or a list or tuple of tensors.
        forward: The exchange, which overwrites the tensors that it gets.
        backward: Differentiable functions from the gradients of the results to the gradients of the tensors.

    Returns:
        `given`, or a new list of its tensors if it is a list or tuple.
    """
    tensors = as_list(given)
    if torch.is_grad_enabled() and any(map(_is_recorded, tensors)):
        seen = [tensor if _is_recorded(tensor) else tensor.detach() for tensor in tensors]
        _InPlace.apply(forward, backward, *seen)  # type: ignore[no-untyped-call]
    else:
        forward(tensors)
    return tensors if isinstance(given, list | tuple) else given


def overwritten_later(given: Any) -> Any:
    """Return `given`, whose tensors an asynchronous exchange will overwrite, after telling autograd of the change.

    Raises:
        UnsupportedTensorError: Autograd would have to record the change of a tensor, and cannot.
    """
    for tensor in as_list(given):
        if torch.is_grad_enabled() and _is_recorded(tensor):
            raise UnsupportedTensorError(
                f"autograd has recorded how this tensor of shape {tuple(tensor.shape)} was made, and an asynchronous operation "
                "that overwrites it cannot be recorded: use the blocking form, or tensor.detach() if no gradient is to go "
                "through it."
            )
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            ADAPTER.touch(tensor)  # autograd raises if a backward pass needs the values from before
    return given


def differentiable(
    given: Any,
    forward: Exchange,
    backward: Exchange,
    compression: Compressor = Compression.none,
) -> Any:
    """Exchange one tensor or a list of tensors. Autograd records the exchange only if a tensor requires a gradient.

    Args:
        given: A tensor, or a list or tuple of tensors.
        forward: The exchange, which returns new tensors.
        backward: Differentiable functions from the gradients of the results to the gradients of the tensors.
        compression: Compresses the tensors, and their gradients too, because autograd goes through the compressor's operations.

    Returns:
        The result, or a list of results.

    Raises:
        ArgumentError: `compression` has no method `compress`.
    """
    if not callable(getattr(compression, "compress", None)):
        raise ArgumentError(
            f"compression={compression!r}: expected hvd.Compression.none, fp16 or bf16, or what has compress and decompress."
        )
    if compression is Compression.none and isinstance(given, torch.Tensor) and not _needs_gradient([given]):
        return forward([given])[0]  # the same as below, for the commonest call
    pairs = [compression.compress(tensor) for tensor in as_list(given)]
    tensors = [tensor for tensor, _ in pairs]
    if _needs_gradient(tensors):
        results: Sequence[torch.Tensor] = _Differentiable.apply(forward, backward, *tensors)  # type: ignore[no-untyped-call]
    else:
        results = forward(tensors)
    whole = [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]
    return whole if isinstance(given, list | tuple) else whole[0]
