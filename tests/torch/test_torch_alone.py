"""Ranks that have trained alone, for the program forgot the one line: said at its end, by rank 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hvdlite_torch as hvd
from hvdlite.api import world
from hvdlite.config import Config
from hvdlite.testing import on_ranks
from hvdlite_torch.checks import alone

TOLD = "hvdlite: each of the 2 ranks has trained alone: no gradient was exchanged."


def program(shares: Callable[[torch.nn.Module, torch.optim.Optimizer], object]) -> None:
    model = torch.nn.Linear(4, 2)
    hvd.broadcast_parameters(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters())
    hvd.barrier()
    shares(model, optimizer)
    alone.look(world())


def seen(caplog: pytest.LogCaptureFixture, shares: Callable[..., object], size: int = 2, **settings: bool) -> str:
    caplog.clear()
    on_ranks(size, program, shares, config=Config(**{"advice": True, **settings}))
    return "".join(caplog.messages)


def test_ranks_that_train_alone_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    said = seen(caplog, lambda model, optimizer: None)
    assert said.count(TOLD) == 1
    assert "Adam" in said and "hvd.DistributedOptimizer(optimizer)" in said


@pytest.mark.parametrize(
    "shares",
    [
        lambda model, optimizer: hvd.DistributedOptimizer(optimizer),
        lambda model, optimizer: hvd.allreduce(model.weight.data),
        lambda model, optimizer: hvd.allgather(model.weight.data),
    ],
    ids=["wrapped", "averages", "gathers"],
)
def test_others_are_not(caplog: pytest.LogCaptureFixture, shares: Callable[..., object]) -> None:
    assert seen(caplog, shares) == ""


def test_one_rank_and_those_that_want_no_advice_are_not(caplog: pytest.LogCaptureFixture) -> None:
    assert seen(caplog, lambda model, optimizer: None, size=1) == ""
    assert seen(caplog, lambda model, optimizer: None, advice=False) == ""
