"""The closure that some optimizers evaluate in `step`: once, as most do, or as often as they like, as LBFGS does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hvdlite
from hvdlite import ProcessSet

Closure = Callable[[], Any]


def closure_of(args: Any, kwargs: Any) -> Closure | None:
    """The closure among the arguments of a step, the first of which is the optimizer."""
    found: Closure | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return found


def replace_closure(args: Any, kwargs: Any, closure: Closure) -> tuple[Any, Any]:
    """The arguments of a step, the first of them the optimizer, with another closure."""
    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})


def joined_loss(loss: Any, weight: float, average: bool, process_set: ProcessSet | None) -> Any:
    """The loss of the joined batch. Every rank calls this.

    Args:
        loss: Of this rank: a tensor with one element, or a number.
        weight: Share of this rank in an average.
        average: Divide by the sum of the weights.
        process_set: The ranks that take part.

    Returns:
        As `loss`, and the same on all ranks.
    """
    value = torch.as_tensor(loss, dtype=torch.float64).detach()
    share, total = hvdlite.allreduce(
        [value * weight, torch.full_like(value, weight)], hvdlite.Sum, process_set=process_set
    )
    joined = share / total if average else share
    return joined.to(loss) if isinstance(loss, torch.Tensor) else float(joined)
