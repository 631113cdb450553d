"""Closures, which some optimizers evaluate in `step`: most do it once, LBFGS as often as it likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hvdlite
from hvdlite import ProcessSet

Closure = Callable[[], Any]


def closure_of(args: Any, kwargs: Any) -> Closure | None:
    """Return the closure among the arguments of a step, or None. With a method, ``args[0]`` is the optimizer."""
    found: Closure | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return found


def replace_closure(args: Any, kwargs: Any, closure: Closure) -> tuple[Any, Any]:
    """Return the arguments of a step with another closure. ``args[0]`` is the optimizer."""
    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})


def joint_loss(loss: Any, weight: float, average: bool, process_set: ProcessSet | None) -> Any:
    """Return the loss of the joint batch of all ranks. Every rank calls this.

    Args:
        loss: The loss of this rank: a tensor with one element, or a number.
        weight: The number of samples of this rank.
        average: Whether the sum is divided by the sum of the weights.
        process_set: The ranks that take part.

    Returns:
        A tensor or a float, of the type of `loss`; the same value on all ranks.
    """
    value = torch.as_tensor(loss, dtype=torch.float64).detach()
    weighted, total = hvdlite.allreduce(
        [value * weight, torch.full_like(value, weight)], hvdlite.Sum, process_set=process_set
    )
    joint = weighted / total if average else weighted
    return joint.to(loss) if isinstance(loss, torch.Tensor) else float(joint)
