"""The sharded step: who holds what, what a checkpoint is, and what it refuses."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError
from hvdlite_torch.step.shardable import ELEMENTWISE
from tests.spmd.test_torch_training import (
    MODEL,
    OPTIMIZERS,
    X,
    Y,
    assert_equal_everywhere,
    distance,
    flat,
    split,
    train,
)


class NormalizedSGD(torch.optim.Optimizer):
    """Steps of unit length for each parameter: right only if a parameter is never cut."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    momentum.mul_(0.9).add_(parameter.grad)
                    parameter.sub_(momentum / momentum.norm() * group["lr"])


ALL = {**OPTIMIZERS, "normalized": lambda p: NormalizedSGD(p, 0.01)}


def sharded(kind: str, model: torch.nn.Module) -> Any:
    shard: Any = "parameters" if kind == "normalized" else True
    return hvd.DistributedOptimizer(ALL[kind](model.parameters()), shard=shard)


@pytest.mark.parametrize("kind", ALL)
def test_state_is_shared_out_and_checkpoints_are_ordinary(ranks: Any, kind: str) -> None:
    """Half of the training in one process, then a checkpoint, then half on the ranks; and back."""
    half, single = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
    begun = ALL[kind](half.parameters())
    train(half, begun, slice(None), steps=10)
    checkpoint = copy.deepcopy(begun.state_dict())
    alone = ALL[kind](single.parameters())
    train(single, alone, slice(None), steps=20)

    def check() -> None:
        model = copy.deepcopy(half)
        optimizer = sharded(kind, model)
        optimizer.load_state_dict(copy.deepcopy(checkpoint))
        held = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.dim())
        whole = sum(value.numel() for state in checkpoint["state"].values() for value in state.values() if value.dim())
        assert sum(hvd.allgather_object(held)) == whole
        if kind != "normalized" and hvd.is_homogeneous():  # else some rank has no part
            assert held <= whole / hvd.size() + 64  # parts end at multiples of 16 elements
        train(model, optimizer, split(48, "uneven"), steps=10)
        assert distance(flat(model), flat(single)) <= 1e-5
        assert_equal_everywhere(flat(model))
        state = optimizer.state_dict()
        assert state["param_groups"] == alone.state_dict()["param_groups"]
        torch.testing.assert_close(state["state"], alone.state_dict()["state"], rtol=1e-4, atol=1e-6)
        back = copy.deepcopy(model)
        plain = ALL[kind](back.parameters())
        plain.load_state_dict(state)
        train(back, plain, slice(None), steps=1)  # an ordinary optimizer goes on from it
        train(model, optimizer, split(48, "equal"), steps=1)
        assert distance(flat(model), flat(back)) <= 1e-5

    ranks(check)


@pytest.mark.parametrize("name", [cls.__name__ for cls in sorted(ELEMENTWISE, key=lambda cls: cls.__name__)])
def test_every_optimizer_that_cuts_parameters(ranks: Any, name: str) -> None:
    make = getattr(torch.optim, name)
    single = copy.deepcopy(MODEL)
    train(single, make(single.parameters(), lr=1e-3), slice(None), steps=4)

    def check() -> None:
        model = copy.deepcopy(MODEL)
        train(
            model, hvd.DistributedOptimizer(make(model.parameters(), lr=1e-3), shard=True), split(48, "equal"), steps=4
        )
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


def test_wrapping_keeps_state_and_groups(ranks: Any) -> None:
    single = copy.deepcopy(MODEL)
    alone = torch.optim.Adam([{"params": single[0].parameters()}, {"params": single[2].parameters(), "lr": 1e-3}], 1e-2)
    train(single, alone, slice(None), steps=3)
    half, state = copy.deepcopy(single), copy.deepcopy(alone.state_dict())
    train(single, alone, slice(None), steps=3)

    def check() -> None:
        model = copy.deepcopy(half)
        plain = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[2].parameters()}])
        plain.load_state_dict(copy.deepcopy(state))
        optimizer = hvd.DistributedOptimizer(plain, shard=True)
        hvd.broadcast_optimizer_state(optimizer)
        groups = [list(group["params"]) for group in optimizer.param_groups]
        train(model, optimizer, split(48, "uneven"), steps=3)
        assert distance(flat(model), flat(single)) <= 1e-5
        after = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert all(a is b for a, b in zip(itertools.chain(*groups), after, strict=True))

    ranks(check)


def test_everybody_starts_as_the_first_rank(ranks: Any) -> None:
    def check() -> None:
        parameter = torch.nn.Parameter(torch.full((40,), float(hvd.rank())))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), shard=True)
        assert (parameter == 0).all()
        parameter.grad = torch.full((40,), float(hvd.rank()))
        optimizer.step()
        assert (parameter == -(hvd.size() - 1) / 2).all()
        hvd.barrier()

    ranks(check)


def test_a_closure_is_evaluated_once_by_all(ranks: Any) -> None:
    single = copy.deepcopy(MODEL)

    def run(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: slice) -> list[float]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X[rows]), Y[rows])
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)]

    losses = run(single, OPTIMIZERS["adam"](single.parameters()), slice(None))

    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()), shard=True)
        assert run(model, optimizer, split(48, "equal")) == pytest.approx(losses, rel=1e-5)
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


def test_what_it_refuses(ranks: Any) -> None:
    def check() -> None:
        model = copy.deepcopy(MODEL)
        with pytest.raises(ArgumentError, match="LBFGS cannot be sharded"):
            hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), shard=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), shard=True)
        with pytest.raises(ArgumentError, match="synchronize"):
            optimizer.synchronize()
        with pytest.raises(ArgumentError, match="cannot be copied or pickled"):
            pickle.dumps(optimizer)
        F.cross_entropy(model(X), Y).backward()
        model[0].weight.data = model[0].weight.data.clone()
        with pytest.raises(ArgumentError, match=r"shape \(32, 10\) was given other memory"):
            optimizer.step()

    ranks(check)


def test_a_resized_parameter_is_an_error(ranks: Any) -> None:
    def check() -> None:
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
        parameter.data = torch.zeros(5)
        parameter.sum().backward()
        with pytest.raises(ArgumentError, match=r"shape \(3,\) has become one of .* \(5,\)"):
            optimizer.step()

    ranks(check)
