"""The learning rate of a large batch: `scale_lr` scales it with the batch, and `warmup` approaches it step by step."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.checks import check_count
from hvdlite.errors import ArgumentError
from hvdlite_torch.step.wrapped import Opt

Rule = Literal["linear", "sqrt"]


@overload
def scale_lr(
    optimizer_or_lr: float,
    rule: Rule = "linear",
    batches: float | None = None,
    *,
    process_set: ProcessSet | None = None,
) -> float: ...


@overload
def scale_lr(
    optimizer_or_lr: Opt, rule: Rule = "linear", batches: float | None = None, *, process_set: ProcessSet | None = None
) -> Opt: ...


def scale_lr(
    optimizer_or_lr: float | torch.optim.Optimizer,
    rule: Rule = "linear",
    batches: float | None = None,
    *,
    process_set: ProcessSet | None = None,
) -> float | torch.optim.Optimizer:
    """Scale a learning rate that was found for the batch of one rank to the global batch of all ranks.

    Args:
        optimizer_or_lr: A learning rate; or an optimizer, whose groups are changed in place. Call this function before you make
            a scheduler for the optimizer, because a scheduler remembers the rate that it finds.
        rule: The factor for a batch that is k times as large. "linear" means k, for SGD (Goyal et al., "Accurate, large
            minibatch SGD", arXiv:1706.02677, section 2.1). "sqrt" means √k, for Adam and similar optimizers (Malladi et al.,
            "On the SDEs and scaling rules for adaptive gradient algorithms", arXiv:2205.10287).
        batches: The number k; None means the number of ranks. If each rank accumulates the gradients of a backward passes per
            step, k is a × size().
        process_set: The ranks that train together; None means all ranks.

    Returns:
        The scaled learning rate, or the optimizer.

    Raises:
        ArgumentError: `rule` is unknown, `batches` is not positive, or the optimizer has a scheduler already.
        NotInitializedError: `init` has not been called, and `batches` is not given.

    Examples:
        >>> on_ranks(4, lambda: (hvd.scale_lr(0.1), hvd.scale_lr(0.1, "sqrt")))[0]
        (0.4, 0.2)
    """
    factor = _factor(rule, batches, process_set)
    if not isinstance(optimizer_or_lr, torch.optim.Optimizer):
        return optimizer_or_lr * factor
    if any("initial_lr" in group for group in optimizer_or_lr.param_groups):
        raise ArgumentError(
            "scale_lr: this optimizer has a learning-rate scheduler already, or its state was loaded from one that had; the "
            "scheduler would undo the scaling. Call scale_lr before the scheduler is made, and not after a restart."
        )
    for group in optimizer_or_lr.param_groups:
        group["lr"] = group["lr"] * factor  # a float or a tensor
    return optimizer_or_lr


def warmup(
    optimizer: torch.optim.Optimizer,
    steps: int,
    then: LRScheduler | None = None,
    rule: Rule = "linear",
    batches: float | None = None,
    *,
    process_set: ProcessSet | None = None,
) -> LRScheduler:
    """Make a scheduler that begins with the learning rate of one rank's batch, and reaches the scaled rate in equal steps.

    A large rate in the first steps would move the weights too far. Call the scheduler's `step` after each batch, as usual::

        optimizer = hvd.scale_lr(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps - 500)
        scheduler = hvd.warmup(optimizer, 500, then=decay)

    Args:
        optimizer: The optimizer, whose learning rate is scaled already (see `scale_lr`).
        steps: The number of calls of ``scheduler.step()`` until the scaled rate is reached. Goyal et al. took five epochs.
        then: The scheduler of the steps after the warmup, which counts them from 0. With None the rate stays constant.
        rule: See `scale_lr`. The first learning rate is the optimizer's divided by the factor of this rule.
        batches: See `scale_lr`; at least 1.
        process_set: See `scale_lr`.

    Returns:
        torch's `LinearLR`; with `then` its `SequentialLR`.

    Raises:
        ArgumentError: `steps` is not a positive integer, `batches` is less than 1, `rule` is unknown, or `then` is a scheduler
            of another optimizer.
        NotInitializedError: `init` has not been called, and `batches` is not given.

    Source: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", arXiv:1706.02677, section 2.2.

    Examples:
        >>> def rates():
        ...     optimizer = hvd.scale_lr(torch.optim.SGD([torch.zeros(1)], lr=0.1))
        ...     schedule = hvd.warmup(optimizer, steps=2)
        ...     for batch in range(4):
        ...         yield round(schedule.get_last_lr()[0], 2)
        ...         optimizer.step()
        ...         schedule.step()
        >>> on_ranks(4, lambda: list(rates()))[0]
        [0.1, 0.25, 0.4, 0.4]
    """
    check_count("warmup: steps", steps)
    factor = _factor(rule, batches, process_set)
    if factor < 1:
        raise ArgumentError(f"warmup: batches={batches}: expected at least 1, so that the rate rises.")
    if then is not None and then.optimizer is not optimizer:
        raise ArgumentError("warmup: `then` is a scheduler of another optimizer; make it for this one.")
    rising = LinearLR(optimizer, start_factor=1 / factor, end_factor=1.0, total_iters=steps)
    return rising if then is None else SequentialLR(optimizer, [rising, then], milestones=[steps])


def _factor(rule: str, batches: float | None, process_set: ProcessSet | None) -> float:
    """Return the factor of the learning rate for a batch that is `batches` times as large."""
    if batches is None:
        batches = len(world("scale_lr()").ranks(process_set))
    if not (batches > 0 and math.isfinite(batches)):
        raise ArgumentError(f"batches={batches}: expected a positive number.")
    if rule == "linear":
        return float(batches)
    if rule == "sqrt":
        return math.sqrt(batches)
    raise ArgumentError(f"rule={rule!r}: expected 'linear' or 'sqrt'.")
