"""`plain_result`: the result of a sliced layer as a plain tensor, for the layers that follow.

DTensor returns a tensor that a collective may still write; the first operation on it waits. Results that are not used would
never be waited for, and each operation on such a tensor takes longer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from hvdlite_torch.tensors.sliced import waited_for


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Any:
        return waited_for(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient


def plain_result(result: DTensor) -> torch.Tensor:
    """Return the whole tensor, after its collective has ended. Gradients pass through."""
    local: torch.Tensor = _Wait.apply(result.redistribute(placements=[Replicate()]).to_local())  # type: ignore[no-untyped-call]
    return local


def return_plain(layer: nn.Module) -> None:
    """Let a layer that torch has sliced return its result after the collective has ended."""
    layer.register_forward_hook(lambda module, args, result: _Wait.apply(result))  # type: ignore[no-untyped-call]
