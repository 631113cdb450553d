"""What the ranks must agree on when they make an optimizer distributed: said by name, so that a mistake is easily found.

Gradients are exchanged by their places alone. Two ranks with parameters of equal shapes in another order would add up what does
not belong together, and no exchange would notice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvdlite.errors import MismatchError
from hvdlite.negotiation.mismatch import variants_text
from hvdlite.tensors.registry import adapter_for


def check_agreement(
    parameters: Sequence[torch.Tensor],
    names: Mapping[int, str],
    arguments: Mapping[str, object],
    ranks: Sequence[int],
    gather: Callable[[Any], list[Any]],
) -> None:
    """Raise on all ranks if they differ. Every rank calls this.

    Args:
        parameters: Those that are trained, in the optimizer's order.
        names: By ``id(parameter)``; of none, some or all.
        arguments: What else must be equal.
        ranks: The world ranks that take part.
        gather: Makes a list of the objects of all of them, in the order of `ranks`.

    Raises:
        MismatchError: They differ; the text says in what first.
        UnsupportedTensorError: A parameter that cannot be exchanged. Raised on this rank alone, before it says anything.
    """
    lines = [f"{key}={value!r}" for key, value in arguments.items()]
    for number, parameter in enumerate(parameters):
        info = adapter_for(parameter).info(parameter)
        name = f" {names[id(parameter)]!r}" if id(parameter) in names else ""
        lines.append(f"parameter {number}{name} is {info.dtype} of shape {info.shape}")
    lines.append(f"trained parameters: {len(parameters)}")
    check_same(lines, "what DistributedOptimizer is given", ranks, gather)


def check_same(lines: Sequence[str], what: str, ranks: Sequence[int], gather: Callable[[Any], list[Any]]) -> None:
    """Raise on all ranks if their lines differ. Every rank calls this.

    Args:
        lines: What is to be equal.
        what: What the lines are about.
        ranks: The world ranks that take part.
        gather: Makes a list of the objects of all of them, in the order of `ranks`.

    Raises:
        MismatchError: They differ; the text says in what first.
    """
    if len(set(gather(hashlib.sha256("\n".join(lines).encode()).hexdigest()))) == 1:
        return
    everybody: list[list[str]] = gather(lines)
    text = variants_text(ranks, everybody)
    raise MismatchError(f"the ranks do not agree on {what}:\n{text}")
