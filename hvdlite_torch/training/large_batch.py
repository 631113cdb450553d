"""The learning rate of a large batch: scaled with the batch, and approached step by step."""

from __future__ import annotations

import math
from typing import Literal, TypeVar

import torch
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError

Scaled = TypeVar("Scaled", float, torch.optim.Optimizer)
Rule = Literal["linear", "sqrt"]


def scale_lr(
    optimizer_or_lr: Scaled,
    rule: Rule = "linear",
    batches: float | None = None,
    *,
    process_set: ProcessSet | None = None,
) -> Scaled:
    """Scale a learning rate that was found for the batch of one rank to the joined batch of all.

    Args:
        optimizer_or_lr: A learning rate; or an optimizer, whose groups are changed in place. Before a scheduler is made for
            it: schedulers remember the rate that they find.
        rule: By how much, if the batch grows k-fold. "linear": k, for SGD (Goyal et al., "Accurate, large minibatch SGD",
            arXiv:1706.02677, section 2.1). "sqrt": √k, for Adam and its kin (Malladi et al., "On the SDEs and scaling rules
            for adaptive gradient algorithms", arXiv:2205.10287).
        batches: k; by default the number of ranks. With a on each rank accumulated backward passes per step: a × size().
        process_set: The ranks that train together; all by default.

    Returns:
        The learning rate, or the optimizer.

    Raises:
        ArgumentError: Another rule, `batches` is not positive, or the optimizer has a scheduler already.
        NotInitializedError: Before `init`, if `batches` is not given.
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
    """Begin with the learning rate of one rank's batch, and reach the optimizer's, scaled by `scale_lr`, in equal steps.

    A large rate at once would throw the first weights too far. `step` the scheduler after each batch, as usual::

        optimizer = hvd.scale_lr(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps - 500)
        scheduler = hvd.warmup(optimizer, 500, then=decay)

    Args:
        optimizer: With the scaled rate.
        steps: Calls of ``scheduler.step()`` until it is reached. Goyal et al. took as many as make five epochs.
        then: What goes on from there, counting from 0. The rate stays as it is if None.
        rule: As for `scale_lr`: the first rate is the optimizer's divided by the same factor.
        batches: As for `scale_lr`.
        process_set: As for `scale_lr`.

    Returns:
        torch's `LinearLR`, or, before another scheduler, its `SequentialLR`.

    Raises:
        ArgumentError: `steps` or `batches` is not positive, or another rule; or `then` is for another optimizer.

    Source: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", arXiv:1706.02677, section 2.2.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"warmup: steps={steps!r}: expected a whole number from 1.")
    factor = _factor(rule, batches, process_set)
    if factor < 1:
        raise ArgumentError(f"warmup: batches={batches}: expected at least 1, so that the rate rises.")
    if then is not None and then.optimizer is not optimizer:
        raise ArgumentError("warmup: `then` is a scheduler of another optimizer; make it for this one.")
    rising = LinearLR(optimizer, start_factor=1 / factor, end_factor=1.0, total_iters=steps)
    return rising if then is None else SequentialLR(optimizer, [rising, then], milestones=[steps])


def _factor(rule: str, batches: float | None, process_set: ProcessSet | None) -> float:
    """By how much the learning rate grows with the batch."""
    if batches is None:
        batches = len(world("scale_lr()").ranks(process_set))
    if not (batches > 0 and math.isfinite(batches)):
        raise ArgumentError(f"batches={batches}: expected a positive number.")
    if rule == "linear":
        return float(batches)
    if rule == "sqrt":
        return math.sqrt(batches)
    raise ArgumentError(f"rule={rule!r}: expected 'linear' or 'sqrt'.")
