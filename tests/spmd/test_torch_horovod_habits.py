"""What programs for Horovod do with a torch optimizer under its names: against closed forms."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import hvdlite_torch as own
from hvdlite.config import Config
from hvdlite.errors import MismatchError
from hvdlite.testing import on_ranks
from hvdlite_torch import horovod as theirs
from tests.conftest import UNDER_MPI


def step(optimizer: torch.optim.Optimizer, weight: torch.Tensor, factor: float) -> None:
    """A step whose gradient is `factor` times the mean of 1, …, size."""
    optimizer.zero_grad()
    (weight * factor * (1.0 + own.rank())).sum().backward()
    optimizer.step()


def refused() -> contextlib.AbstractContextManager[Any]:
    if own.size() == 1:
        return contextlib.nullcontext()
    return pytest.raises(MismatchError, match="not in the same state")


@pytest.mark.parametrize("early", [False, True])
def test_rates_that_differ_before_the_first_broadcast_are_told(ranks: Any, early: bool) -> None:
    """A first step fills the state, each rank by its own rate; then all ranks get the state of one."""

    def check() -> None:
        rank, size = own.rank(), own.size()
        mean = (size + 1) / 2
        weight = torch.zeros(1, requires_grad=True)
        optimizer: Any = theirs.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1 * (1 + rank), momentum=0.5))
        (weight * (1.0 + rank)).sum().backward()
        if early:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        assert weight.item() == pytest.approx(-0.1 * (1 + rank) * mean)
        own.broadcast_parameters([weight.data])
        own.broadcast_optimizer_state(optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.1
        step(optimizer, weight, 1.0)  # the momentum is half the last gradient
        assert weight.item() == pytest.approx(-0.1 * mean - 0.1 * 1.5 * mean)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
        with refused():
            step(optimizer, weight, 1.0)

    ranks(check)


@pytest.mark.skipif(UNDER_MPI, reason="the test chooses the setting of its threads")
def test_rank_0_tells_which_rates_differ() -> None:
    def check() -> None:
        weight = torch.zeros(1, requires_grad=True)
        optimizer = theirs.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1 * (1 + own.rank())))
        step(optimizer, weight, 1.0)

    with pytest.warns(RuntimeWarning, match="not in the same state.*broadcast_optimizer_state") as told:
        on_ranks(2, check, config=Config(advice=True))
    (text,) = [str(each.message) for each in told if "not in the same state" in str(each.message)]
    assert "rank 0: the learning rate of group 0 is 0.1\n" in text
    assert "rank 1: the learning rate of group 0 is 0.2\n" in text


def test_rates_that_differ_later_are_an_error(ranks: Any) -> None:
    def check() -> None:
        weight = torch.zeros(1, requires_grad=True)
        optimizer = theirs.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
        step(optimizer, weight, 1.0)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + own.rank())
        with refused():
            step(optimizer, weight, 1.0)

    ranks(check)


def test_hvdlite_itself_raises_at_once(ranks: Any) -> None:
    def check() -> None:
        weight = torch.zeros(1, requires_grad=True)
        optimizer = own.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1 * (1 + own.rank())))
        with refused():
            step(optimizer, weight, 1.0)

    ranks(check)
