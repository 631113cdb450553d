"""Which optimizers of torch can be stepped in parts, by servers."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.async_sgd.compensation import DelayCompensation, StalenessRate
from hvdlite.errors import ArgumentError, DistributedAlreadyError, UnsupportedTensorError
from hvdlite_torch.checks.trial import differs_alone, known_algorithm
from hvdlite_torch.step.shardable import UNSHARDABLE
from hvdlite_torch.step.wrapped import Distributed
from hvdlite_torch.tensors.sliced import is_sliced
from hvdlite_torch.tensors.split import all_stages


def check_optimizer(given: object) -> None:
    """Raise an error unless servers can step parts of the parameters with an optimizer of this kind.

    Raises:
        DistributedAlreadyError: The optimizer is distributed already.
        ArgumentError: It is no optimizer of torch, or needs all gradients at once, or has nothing to train.
        UnsupportedTensorError: A parameter is a slice (DTensor), or has no memory.
    """
    if isinstance(given, Distributed) or hasattr(given, "_hvdlite_training"):
        raise DistributedAlreadyError("this optimizer is distributed already: wrap the plain one, and once.")
    if not isinstance(given, torch.optim.Optimizer):
        what = given.__name__ if isinstance(given, type) else f"a {type(given).__name__}"
        raise ArgumentError(
            f"AsyncDistributedOptimizer wraps an optimizer of torch; got {what}. Write "
            "hvd.AsyncDistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))."
        )
    name = type(given).__name__
    if isinstance(given, UNSHARDABLE) and not isinstance(given, torch.optim.SparseAdam):
        raise ArgumentError(
            f"{name} needs all gradients at once, and a server has those of its part: use DistributedOptimizer."
        )
    parameters = [p for group in given.param_groups for p in group["params"]]
    if any(is_sliced(p) for p in parameters):
        raise UnsupportedTensorError(
            "a parameter is a DTensor, of which this rank has a slice: use DistributedOptimizer."
        )
    for stages in all_stages(parameters):
        raise ArgumentError(
            f"the parameters are those of one stage of a {stages.kind}, and servers hold a model that all ranks have whole: "
            'use DistributedOptimizer(…, process_set=grid["dp"]).'
        )
    if any(p.is_meta for p in parameters):
        raise UnsupportedTensorError("a parameter is on the device meta: give it memory first (model.to_empty).")
    if not any(p.requires_grad for p in parameters):
        raise ArgumentError("the optimizer has no parameters that require a gradient, so there is nothing to train.")
    if known_algorithm(type(given)) is None and (difference := differs_alone(given)):
        raise ArgumentError(
            f"{name} does not step each parameter by itself, and a server has a part of them. Tried out on small parameters, "
            f"{difference} if the others are not there. Use DistributedOptimizer."
        )


def check_compensation(optimizer: torch.optim.Optimizer, compensation: DelayCompensation | None) -> None:
    """Raise an error unless a compensation can be applied to the optimizer and its parameters.

    Raises:
        ArgumentError: It changes learning rates, and a group has none.
        UnsupportedTensorError: It corrects gradients, and some are complex.
    """
    if compensation is None:
        return
    if isinstance(compensation, StalenessRate) and not all("lr" in group for group in optimizer.param_groups):
        raise ArgumentError(
            f'StalenessRate() divides learning rates, and {type(optimizer).__name__} has a group without "lr".'
        )
    if compensation.needs_pulled and any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        raise UnsupportedTensorError(f"{compensation!r} is for real numbers, and a parameter is complex.")


def check_plain_sgd(optimizer: Any) -> None:
    """Raise an error unless a step of this optimizer only adds to the parameters, so that ranks can share them (hogwild).

    Raises:
        ArgumentError: It is another optimizer than SGD, or has a momentum.
    """
    if type(optimizer) is not torch.optim.SGD:
        raise ArgumentError(
            "hogwild=True is for plain SGD, whose step adds to the parameters and needs no other state; got "
            f"{type(optimizer).__name__}. Use torch.optim.SGD, or leave out hogwild=True: then servers hold the parameters and "
            "the state."
        )
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.device.type != "cpu":
                raise ArgumentError(
                    f"hogwild=True with a parameter on {p.device}: the ranks share host memory. Use DistributedOptimizer, or "
                    "leave out hogwild=True."
                )
    check_no_momentum(optimizer)


def check_no_momentum(optimizer: Any) -> None:
    """Raise ArgumentError if a group of an optimizer whose parameters are shared by the ranks has a momentum."""
    for number, group in enumerate(optimizer.param_groups):
        if group["momentum"]:
            raise ArgumentError(
                f"hogwild=True with momentum={group['momentum']} (group {number}): a momentum is state, which each rank would "
                "have for itself. Use momentum=0 (a schedule may change it), or leave out hogwild=True."
            )
