"""What a program has done to a layer that slices would break: `altered`, `watched`. And `slice_parameter`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import parametrize

_OF_INPUTS = {"_forward_pre_hooks": "forward pre-hook"}
_OF_RESULTS = {"_forward_hooks": "forward hook"}
_OF_GRADIENTS = {"_backward_hooks": "backward hook", "_backward_pre_hooks": "backward pre-hook"}


def slice_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Any) -> None:
    """Replace a parameter of a module by its slices. Attributes that a program has put on the parameter stay."""
    whole = module._parameters[name]
    if whole is not None:
        sliced = nn.Parameter(distribute_tensor(whole.detach(), mesh, [placement]), whole.requires_grad)
        sliced.__dict__.update(whole.__dict__)
        module._parameters[name] = sliced


def altered(module: nn.Module, names: Iterable[str] = ("weight", "bias")) -> str:
    """Return why a module does not do what its class does with its parameters; an empty text if it does.

    Args:
        module: The module.
        names: The parameters that its class has.
    """
    if parametrize.is_parametrized(module):
        return f"parametrized: {', '.join(module.parametrizations)}"  # type: ignore[arg-type]
    if "forward" in module.__dict__:
        return "its forward pass was put on the object"
    for name in names:
        if (
            name not in module._parameters
        ):  # weight_norm, spectral_norm and pruning compute it, before each forward pass
            origin = ", ".join(each for each in (*module._parameters, *module._buffers) if each.startswith(f"{name}_"))
            makers = {type(hook).__name__ for hook in module._forward_pre_hooks.values()} - {"function", "method"}
            return f"its {name} is computed from {origin or 'others'} ({', '.join(sorted(makers)) or 'by a hook'})"
        parameter: Any = module._parameters[name]
        if parameter is not None and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            return f"its {name} has gradient hooks, which would get slices"
    return ""


def watched(module: nn.Module, *, inputs: bool = True, results: bool = True) -> str:
    """Return which hooks of a module would see slices; an empty text if there are none.

    Args:
        module: The module, whose inputs or results become slices.
        inputs: Whether its inputs do.
        results: Whether its results do.
    """
    kinds = _OF_GRADIENTS | (_OF_INPUTS if inputs else {}) | (_OF_RESULTS if results else {})
    found = [
        f"{kind} {getattr(hook, '__name__', type(hook).__name__)}"
        for attribute, kind in kinds.items()
        for hook in getattr(module, attribute).values()
    ]
    return f"slices would reach its {', '.join(found)}" if found else ""
