"""Learning rates for large batches, against their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError
from hvdlite_torch.training.large_batch import scale_lr, warmup


def sgd(lr: Any = 0.1) -> torch.optim.SGD:
    groups = [
        {"params": [torch.zeros(2, requires_grad=True)]},
        {"params": [torch.zeros(1, requires_grad=True)], "lr": 0.5},
    ]
    return torch.optim.SGD(groups, lr=lr)


def rates(optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler, steps: int) -> list[float]:
    """The rate of the first group in each of the first steps."""
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.zero_grad()
        sum(parameter.sum() for group in optimizer.param_groups for parameter in group["params"]).backward()
        optimizer.step()
        scheduler.step()
    return found


def test_rates_grow_with_the_ranks(ranks: Any) -> None:
    def check() -> None:
        size = hvd.size()
        assert scale_lr(0.1) == pytest.approx(0.1 * size)
        assert scale_lr(0.1, "sqrt") == pytest.approx(0.1 * math.sqrt(size))
        assert scale_lr(0.1, "linear", 6) == pytest.approx(0.6)
        assert scale_lr(0.1, rule="sqrt", batches=9) == pytest.approx(0.3)
        optimizer = sgd()
        assert scale_lr(optimizer) is optimizer
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * size, 0.5 * size])
        tensor_rate = sgd(torch.tensor(0.1))
        assert float(scale_lr(tensor_rate, batches=2).param_groups[0]["lr"]) == pytest.approx(0.2)
        if size > 2:
            some = hvd.add_process_set([0, 1])
            assert scale_lr(1.0, process_set=some) == 2
            hvd.remove_process_set(some)

    ranks(check)


@pytest.mark.parametrize(("rule", "root"), [("linear", 1), ("sqrt", 2)])
def test_warmup_rises_in_equal_steps_to_the_scaled_rate(ranks: Any, rule: Any, root: int) -> None:
    def check() -> None:
        top = 0.1 * hvd.size() ** (1 / root)
        optimizer = scale_lr(sgd(), rule)
        scheduler = warmup(optimizer, 5, rule=rule)
        expected = [0.1 + (top - 0.1) * min(step, 5) / 5 for step in range(9)]
        assert rates(optimizer, scheduler, 9) == pytest.approx(expected)
        assert optimizer.param_groups[1]["lr"] == pytest.approx(0.5 * hvd.size() ** (1 / root))

    ranks(check)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def stairs(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.MultiStepLR(optimizer, milestones=[3, 6])


def fading(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


@pytest.mark.parametrize(
    ("make", "formula"),
    [
        (cosine, lambda step: (1 + math.cos(math.pi * step / 10)) / 2),
        (stairs, lambda step: 0.1 ** ((step >= 3) + (step >= 6))),
        (fading, lambda step: 0.9**step),
    ],
    ids=["cosine", "stairs", "fading"],
)
def test_another_schedule_goes_on_from_there(ranks: Any, make: Any, formula: Any) -> None:
    def check() -> None:
        k = 4
        optimizer = hvd.DistributedOptimizer(scale_lr(sgd(), batches=k))
        scheduler = warmup(optimizer, 6, then=make(optimizer), batches=k)
        expected = [0.1 + 0.3 * step / 6 for step in range(6)] + [0.4 * formula(step) for step in range(10)]
        assert rates(optimizer, scheduler, 16) == pytest.approx(expected)

    ranks(check)


def test_it_goes_on_after_a_restart(ranks: Any) -> None:
    def check() -> None:
        def begin() -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
            optimizer = scale_lr(sgd(), batches=4)
            return optimizer, warmup(optimizer, 6, then=cosine(optimizer), batches=4)

        optimizer, scheduler = begin()
        whole = rates(optimizer, scheduler, 14)
        optimizer, scheduler = begin()
        first = rates(optimizer, scheduler, 4)
        saved = optimizer.state_dict(), scheduler.state_dict()
        optimizer, scheduler = begin()
        optimizer.load_state_dict(saved[0])
        scheduler.load_state_dict(saved[1])
        assert first + rates(optimizer, scheduler, 10) == pytest.approx(whole)

    ranks(check)


def test_what_cannot_be(ranks: Any) -> None:
    def check() -> None:
        optimizer = sgd()
        for bad in (0, -1, float("nan"), float("inf")):
            with pytest.raises(ArgumentError, match="expected a positive number"):
                scale_lr(0.1, batches=bad)
        with pytest.raises(ArgumentError, match="rule='square'"):
            scale_lr(0.1, "square")  # type: ignore[arg-type]
        for steps in (0, -3, 2.5, True):
            with pytest.raises(ArgumentError, match="steps="):
                warmup(optimizer, steps)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="at least 1"):
            warmup(optimizer, 3, batches=0.5)
        with pytest.raises(ArgumentError, match="another optimizer"):
            warmup(optimizer, 3, then=cosine(sgd()))
        cosine(optimizer)
        with pytest.raises(ArgumentError, match="scheduler already"):
            scale_lr(optimizer)

    ranks(check)
