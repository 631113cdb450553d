"""The operations of ``horovod.torch`` whose gradients are not those of the sum of all ranks' losses.

With n ranks, the gradients of Horovod's `allgather` and `broadcast` are the gradients of `hvdlite_torch` divided by n, and the
gradients of Horovod's `reducescatter` are n times as large. The learning rates of programs that differentiate these operations
were chosen for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from hvdlite.adapter.arguments import divided, with_scaled_input
from hvdlite_torch.ops import allgather as gathering
from hvdlite_torch.ops import broadcast as broadcasting
from hvdlite_torch.ops import reducescatter as scattering

__all__ = ["allgather", "broadcast", "grouped_allgather", "grouped_reducescatter", "reducescatter"]

P = ParamSpec("P")
R = TypeVar("R")


class _Scaled(torch.autograd.Function):
    """The identity, with a gradient that is multiplied by a number."""

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
    return with_scaled_input(function, _scaled, factor)


allgather = _with_gradient(gathering.allgather, divided)
grouped_allgather = _with_gradient(gathering.grouped_allgather, divided)
broadcast = _with_gradient(broadcasting.broadcast, divided)
reducescatter = _with_gradient(scattering.reducescatter, float)
grouped_reducescatter = _with_gradient(scattering.grouped_reducescatter, float)
