"""A check that the ranks make an optimizer distributed with the same parameters and arguments.

Gradients are exchanged by their positions alone. Ranks that have parameters of equal shapes in different orders would add the
gradients of different parameters, and no exchange would notice. The error shows names, so that the mistake is easily found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hvdlite.ranks.together import Together
from hvdlite.tensors.registry import adapter_for


def check_agreement(
    parameters: Sequence[torch.Tensor],
    names: Mapping[int, str],
    arguments: Mapping[str, object],
    together: Together,
) -> None:
    """Raise on all ranks if their parameters or arguments differ. Every rank calls this.

    Args:
        parameters: The parameters that are trained, in the optimizer's order.
        names: The names of some or all parameters, by ``id(parameter)``.
        arguments: The arguments that must be equal, by name.
        together: The ranks that take part.

    Raises:
        MismatchError: The ranks differ; the text shows the first difference.
        UnsupportedTensorError: A parameter cannot be exchanged. This rank alone raises it, before it sends anything.
    """
    lines = [f"{key}={value!r}" for key, value in arguments.items()]
    for number, parameter in enumerate(parameters):
        info = adapter_for(parameter).info(parameter)
        name = f" {names[id(parameter)]!r}" if id(parameter) in names else ""
        lines.append(f"parameter {number}{name} is {info.dtype} of shape {info.shape}")
    lines.append(f"trained parameters: {len(parameters)}")
    together.check_same(lines, "what DistributedOptimizer is given")
