"""What goes into a sliced layer and comes out of it, as plain tensors.

DTensor returns a tensor that a collective may still write; the first operation on it waits. Results that are not used would
never be waited for, and each operation on such a tensor takes longer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from hvdlite.errors import UnsupportedTensorError
from hvdlite_torch.tensors.sliced import waited_for


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Any:
        return waited_for(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # DTensor would leave the second derivative out without a word
            raise UnsupportedTensorError(
                "the gradient of a gradient (create_graph=True, for a penalty of gradients) goes through a sliced layer, "
                "and torch's DTensor cannot be differentiated twice. Leave the layers that it goes through whole: "
                "slice_layers(model, ranks, plan={name: None})."
            )
        (gradient,) = gradients
        return gradient


def plain_result(result: DTensor) -> torch.Tensor:
    """Return the whole tensor, after its collective has ended. Gradients pass through."""
    local: torch.Tensor = _Wait.apply(result.redistribute(placements=[Replicate()]).to_local())  # type: ignore[no-untyped-call]
    return local


def own(parameter: Any) -> Any:
    """Return this rank's slice of a parameter, through which gradients flow; None for None."""
    return None if parameter is None else parameter.to_local()


def entering(tensor: torch.Tensor, weight: Any) -> torch.Tensor:
    """Return a whole input for a layer that computes with its slice of `weight`: its gradient is the sum over the slices."""
    whole = DTensor.from_local(tensor, weight.device_mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def summed(tensor: torch.Tensor, weight: Any) -> torch.Tensor:
    """Return the sum of what the ranks that hold slices of `weight` have computed."""
    return plain_result(DTensor.from_local(tensor, weight.device_mesh, [Partial()], run_check=False))
