"""The operations of ``horovod.torch`` whose gradients are not those of the sum of all ranks' losses, with Horovod's gradients.

With n ranks, the gradients of Horovod's `allgather` and `broadcast` are those of `hvdlite_torch` divided by n, and those of its
`reducescatter` are n times as large. Learning rates of programs that differentiate them were chosen for that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

import hvdlite_torch as own
from hvdlite.arguments import size_of

__all__ = ["allgather", "broadcast", "grouped_allgather", "grouped_reducescatter", "reducescatter"]

P = ParamSpec("P")
R = TypeVar("R")


class _Scaled(torch.autograd.Function):
    """A tensor as it is, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


def _scaled(given: Any, factor: float) -> Any:
    if isinstance(given, list | tuple):
        return [_scaled(each, factor) for each in given]
    if isinstance(given, torch.Tensor) and given.requires_grad and torch.is_grad_enabled():
        return _Scaled.apply(given, factor)  # type: ignore[no-untyped-call]
    return given


def _with_gradient(function: Callable[P, R], factor: Callable[[int], float]) -> Callable[P, R]:
    """`function`, whose gradient is multiplied by the `factor` of the number of ranks that take part.

    The factor is applied to what goes in: programs write into what comes out, which must not be a view therefore.
    """
    signature = inspect.signature(function)
    first = next(iter(signature.parameters))

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments[first]
        tensors = list(given) if isinstance(given, Iterator) else given
        bound.arguments[first] = _scaled(tensors, factor(size_of(bound.arguments.get("process_set"))))
        return function(*bound.args, **bound.kwargs)

    return wrapped


def _divided(size: int) -> float:
    return 1 / size


allgather = _with_gradient(own.allgather, _divided)
grouped_allgather = _with_gradient(own.grouped_allgather, _divided)
broadcast = _with_gradient(own.broadcast, _divided)
reducescatter = _with_gradient(own.reducescatter, float)
grouped_reducescatter = _with_gradient(own.grouped_reducescatter, float)
