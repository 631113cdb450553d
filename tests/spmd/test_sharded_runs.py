"""Small parameters of a sharded optimizer are stepped in runs: as one tensor, as long as that means the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite_torch as hvd

SHAPES = [(7, 3), (5,), (1,), (), (130,), (2, 2, 2), (33,), (64, 9), (3,)]
STEPS = 6

MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "adam of one loop": lambda groups: torch.optim.Adam(groups, lr=1e-2, foreach=False, amsgrad=True),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "asgd": lambda groups: torch.optim.ASGD(groups, lr=1e-2),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-1),
}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def groups_of(some: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": some[:3]}, {"params": some[3:], "lr": 0.05}]


def step(optimizer: torch.optim.Optimizer, some: list[torch.nn.Parameter], number: int, without: set[int]) -> None:
    """Step with gradients that depend on the values and the step, and are the same on all ranks."""
    optimizer.zero_grad()
    used = [p for at, p in enumerate(some) if at not in without]
    sum(((p - 0.1 * number) ** 2).sum() for p in used).backward()  # type: ignore[union-attr]
    optimizer.step()


Between = Callable[[torch.optim.Optimizer, list[torch.nn.Parameter], int], None]


def run(
    optimizer: torch.optim.Optimizer,
    some: list[torch.nn.Parameter],
    without: dict[int, set[int]],
    between: Between,
) -> None:
    for number in range(STEPS):
        between(optimizer, some, number)
        step(optimizer, some, number, without.get(number, set()))


def nothing(optimizer: torch.optim.Optimizer, some: list[torch.nn.Parameter], number: int) -> None:
    """The program does nothing between two steps."""


def move(optimizer: torch.optim.Optimizer, some: list[torch.nn.Parameter], number: int) -> None:
    """Give one parameter to the other group in the middle of the training."""
    if number == 3:
        first, second = optimizer.param_groups
        second["params"] = [p for p in second["params"] if p is not some[6]]
        first["params"] = [*first["params"], some[6]]


def forget_one(optimizer: torch.optim.Optimizer, some: list[torch.nn.Parameter], number: int) -> None:
    """Load a state without that of one parameter, so that its step count is behind."""
    if number == 3:
        state = copy.deepcopy(optimizer.state_dict())
        state["state"].pop(6, None)
        optimizer.load_state_dict(state)


def save_and_load(optimizer: torch.optim.Optimizer, some: list[torch.nn.Parameter], number: int) -> None:
    """Save before each step, and load in the middle."""
    state = optimizer.state_dict()
    if number == 3:
        optimizer.load_state_dict(copy.deepcopy(state))


def check_against_one_process(
    ranks: Any, kind: str, without: dict[int, set[int]], between: Between, joined: bool = False
) -> None:
    expected = parameters()
    alone = MAKE[kind](groups_of(expected))
    run(alone, expected, without, between)

    def check() -> None:
        some = parameters()
        optimizer: Any = hvd.DistributedOptimizer(MAKE[kind](groups_of(some)), shard=True)
        run(optimizer, some, without, between)
        for own, its in zip(some, expected, strict=True):
            torch.testing.assert_close(own.data, its.data, rtol=1e-5, atol=1e-6)
        if joined and hvd.size() > 1:
            runs = optimizer._hvdlite_driver.sharding.shards.runs
            assert any(hvd.allgather_object(bool(runs)))  # a rank's shard may be one piece of a parameter
            assert all(each.together for each in runs)
        state, truth = optimizer.state_dict(), alone.state_dict()
        assert state["param_groups"] == truth["param_groups"]
        torch.testing.assert_close(state["state"], truth["state"], rtol=1e-5, atol=1e-6)

    ranks(check)


@pytest.mark.parametrize("kind", MAKE)
def test_small_parameters_are_stepped_as_one(ranks: Any, kind: str) -> None:
    check_against_one_process(ranks, kind, {}, nothing, joined=True)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("first", [0, 3])
def test_parameters_without_gradients_are_left_out(ranks: Any, kind: str, first: int) -> None:
    check_against_one_process(ranks, kind, {first: {1, 4, 7}, 4: set(range(len(SHAPES))) - {0, 5}}, nothing)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("between", [move, save_and_load])
def test_what_the_program_does_between_steps(ranks: Any, kind: str, between: Between) -> None:
    check_against_one_process(ranks, kind, {}, between)


@pytest.mark.parametrize("kind", sorted(MAKE.keys() - {"adagrad"}))  # Adagrad cannot step without a state
def test_a_parameter_without_state_begins_anew(ranks: Any, kind: str) -> None:
    check_against_one_process(ranks, kind, {}, forget_one)


def test_runs_are_clipped_by_the_norm_of_all(ranks: Any) -> None:
    expected = parameters()
    alone = MAKE["adamw"](groups_of(expected))
    for number in range(STEPS):
        alone.zero_grad()
        sum(((p - 0.1 * number) ** 2).sum() for p in expected).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(expected, 0.5)
        alone.step()

    def check() -> None:
        some = parameters()
        optimizer = hvd.DistributedOptimizer(MAKE["adamw"](groups_of(some)), shard=True, max_grad_norm=0.5)
        run(optimizer, some, {}, nothing)
        for own, its in zip(some, expected, strict=True):
            torch.testing.assert_close(own.data, its.data, rtol=1e-5, atol=1e-6)

    ranks(check)
