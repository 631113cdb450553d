"""Plain SGD on parameters in memory that all ranks share: what a step does, what a meeting means, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hvdlite_torch as hvd
from hvdlite.config import Config
from hvdlite.testing import on_ranks

LR, DECAY, STEPS = 0.5, 0.25, 4


def make(values: Any = (1.0, -2.0, 3.0), **arguments: Any) -> tuple[torch.nn.Parameter, Any]:
    p = torch.nn.Parameter(torch.tensor(values, dtype=torch.float64) + hvd.rank())  # rank 0's count
    sgd = torch.optim.SGD([p, torch.nn.Parameter(torch.ones(2), requires_grad=False)], lr=LR, weight_decay=DECAY)
    return p, hvd.AsyncDistributedOptimizer(sgd, hogwild=True, **arguments)


def in_turns(act: Any) -> None:
    for turn in range(hvd.size()):
        if turn == hvd.rank():
            act()
        hvd.barrier()


def test_steps_in_turns(ranks: Any) -> None:
    """Nobody steps at the same time, so nothing is lost. A rank computes its first gradient with the values of the meeting."""

    def program() -> Any:
        p, optimizer = make()
        hvd.barrier()
        for step in range(STEPS):

            def act(step: int = step) -> None:
                optimizer.zero_grad()
                (p.square().sum() * (step + 1) + p.sum() * hvd.rank()).backward()
                optimizer.step()

            in_turns(act)
        counts = optimizer.pushes, optimizer.mean_delay
        optimizer.finish()
        return p.detach().numpy().copy(), counts

    results = ranks(program)
    size = len(results)
    shared = np.array([1.0, -2.0, 3.0])
    first = shared.copy()
    for step in range(STEPS):
        for rank in range(size):
            seen = first if step == 0 else shared
            shared = shared - LR * (2 * (step + 1) * seen + rank + DECAY * shared)
    for rank, (found, counts) in enumerate(results):
        np.testing.assert_allclose(found, shared, rtol=1e-12)
        assert counts == (STEPS, (rank + (STEPS - 1) * (size - 1)) / STEPS)


def test_a_meeting_gives_each_rank_a_copy(ranks: Any) -> None:
    def program() -> None:
        p, optimizer = make()
        p.grad = torch.ones_like(p)
        for group in optimizer.param_groups:
            group.update(lr=1.0, weight_decay=0.0)
        if hvd.rank() == 0:
            optimizer.step()
        optimizer.synchronize()
        assert p.tolist() == [0.0, -3.0, 2.0]
        p.data += 100 * hvd.rank()  # this rank's copy alone
        last = hvd.size() - 1
        if hvd.rank() == last:
            optimizer.step()
        hvd.barrier()
        assert p[0].item() == (-1.0 if hvd.rank() == last else 100.0 * hvd.rank())
        hvd.barrier()
        optimizer.step(lambda: None)  # it begins with the shared parameters
        optimizer.synchronize()
        assert p[0].item() in [
            -1.0 - steps for steps in range(1, hvd.size() + 1)
        ]  # additions at the same time may be lost
        p.data.fill_(7.0 + hvd.rank())
        optimizer.load_state_dict(plain(optimizer))
        assert p.tolist() == [7.0] * 3
        assert optimizer.state_dict()["state"] == {}
        optimizer.finish()
        p.data += hvd.rank()
        hvd.barrier()
        assert p.tolist() == [7.0 + hvd.rank()] * 3

    ranks(program)


def plain(optimizer: Any) -> dict[str, Any]:
    """Return the state of a plain SGD with the same groups, without a meeting, which would pull."""
    groups = [{**group, "params": [*range(len(group["params"]))]} for group in optimizer.param_groups]
    return {"state": {}, "param_groups": groups}


def test_ranks_at_their_own_pace_solve_what_one_solves(ranks: Any) -> None:
    """All equations have one solution, so lost and torn steps delay it and do not move it."""

    def program() -> Any:
        draw = torch.Generator().manual_seed(hvd.rank())
        p, optimizer = make()
        for group in optimizer.param_groups:
            group.update(lr=0.05, weight_decay=0.0)
        for _ in range(400 + 50 * hvd.rank()):
            rows = torch.randn(8, 3, generator=draw, dtype=torch.float64)
            optimizer.zero_grad()
            (rows @ (p - torch.tensor([2.0, 5.0, -1.0]))).square().mean().backward()
            optimizer.step()
        optimizer.finish()
        return p.detach().numpy().copy()

    results = ranks(program)
    for found in results:
        np.testing.assert_allclose(found, [2.0, 5.0, -1.0], atol=1e-6)
        assert np.array_equal(found, results[0])


def test_steps_that_change_nothing(ranks: Any) -> None:
    def program() -> None:
        p, optimizer = make()
        p.grad = torch.full_like(p, torch.nan)
        with pytest.raises(
            hvd.ArgumentError, match=r"the gradient of parameter 0 of shape \(3,\) has elements that are N"
        ):
            optimizer.step()
        p.grad = torch.ones_like(p)
        optimizer.set_batch_weight(0)
        optimizer.step()
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(hvd.ArgumentError, match=r"momentum=0.9 \(group 0\): a momentum is state"):
            optimizer.step()
        optimizer.finish()
        assert p.tolist() == [1.0, -2.0, 3.0]
        with pytest.raises(hvd.ArgumentError, match=r"finish\(\) was called"):
            optimizer.step()

    ranks(program)


class OwnSGD(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("what", "arguments", "text"),
    [
        (lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9), {}, "momentum=0.9"),
        (lambda ps: torch.optim.Adam(ps), {}, "for plain SGD, .* got Adam"),
        (lambda ps: OwnSGD(ps, 0.1), {}, "for plain SGD, .* got OwnSGD"),
        (lambda ps: torch.optim.SGD(ps, 0.1), {"mode": "sync"}, "hogwild=True with mode='sync': no rank waits"),
        (lambda ps: torch.optim.SGD(ps, 0.1), {"servers": "sharded"}, "with servers='sharded': there are no servers"),
        (lambda ps: torch.optim.SGD(ps, 0.1), {"push_every": 2}, "with push_every=2: each step changes"),
        (
            lambda ps: torch.optim.SGD(ps, 0.1),
            {"delay_compensation": hvd.StalenessRate()},
            r"n=StalenessRate\(\): there are n",
        ),
    ],
)
def test_what_does_not_go_together(ranks: Any, what: Any, arguments: dict[str, Any], text: str) -> None:
    def program() -> None:
        with pytest.raises(hvd.ArgumentError, match=text):
            hvd.AsyncDistributedOptimizer(what([torch.nn.Parameter(torch.ones(2))]), hogwild=True, **arguments)

    ranks(program)


@pytest.mark.parametrize(
    ("hosts", "config", "text"),
    [
        ([0, 1], Config(), "needs all ranks on one host, .* these are on 2 hosts"),
        ([0, 0], Config(shared_memory=False), "needs ranks that share memory, and these do not"),
        ([0, 0], Config(servers=1), "hogwild=True with --servers=1: there are no servers: start the job"),
    ],
)
def test_where_memory_is_not_shared(hosts: list[int], config: Config, text: str) -> None:
    def program() -> None:
        with pytest.raises(hvd.ArgumentError, match=text):
            make()

    on_ranks(2, program, hosts=hosts, config=config)
