"""What becomes of an optimizer's state and of its parameters: as in one process, or an error on all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, MismatchError
from tests.spmd.test_torch_training import (
    MODEL,
    OPTIMIZERS,
    assert_equal_everywhere,
    distance,
    every_way,
    flat,
    split,
    train,
)


@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_stepped_as_by_torch(ranks: Any, dtype: torch.dtype, options: Any) -> None:
    """Of every rank the same gradients, in numbers that have exact averages: the very bits of torch's own step."""
    start = (torch.arange(96 * 70).view(96, 70) % 33 / 16 - 1).to(dtype)
    slope = (torch.arange(96 * 70).view(96, 70) % 17 / 16 - 0.5).to(dtype)

    def trained(wrap: bool) -> torch.Tensor:
        parameter = torch.nn.Parameter(start.clone())
        optimizer: Any = torch.optim.SGD([parameter], lr=0.5, momentum=0.5)
        if wrap:
            optimizer = hvd.DistributedOptimizer(optimizer, **options)
        for _ in range(4):
            optimizer.zero_grad()
            (parameter * slope).float().sum().backward()
            optimizer.step()
        return parameter.detach()

    def check() -> None:
        assert trained(wrap=True).equal(trained(wrap=False))
        assert not trained(wrap=True).equal(start)

    ranks(check)


class Mixed(torch.optim.SGD):
    """Keeps state in dtypes of its own, as optimizers for halves do, some of it in lists."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state.setdefault("master", parameter.double() / 3)
                    state.setdefault("history", [torch.ones(2, dtype=torch.int8), 1.5 * torch.ones(2)])
                    state["step"] = state.get("step", 0) + 1


@pytest.mark.parametrize("cls", [torch.optim.NAdam, Mixed], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("way", ["not distributed", "plain", "sharded", "join"])
def test_state_keeps_the_dtypes_that_the_root_has(ranks: Any, cls: Any, way: str) -> None:
    """torch's `load_state_dict` casts all of it to the parameters' dtype."""

    def steps(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            (parameter * torch.arange(40)).float().square().sum().backward()
            optimizer.step()

    def check() -> None:
        root = hvd.size() - 1
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 40).to(torch.bfloat16))
        optimizer = cls([parameter], lr=1e-2)
        if way == "join":
            optimizer = hvd.DistributedOptimizer(optimizer)
            steps(parameter, optimizer, 2 + (hvd.rank() == root))
            assert hvd.size() == 1 or hvd.join() == root
        else:
            if hvd.rank() == root:
                steps(parameter, optimizer, 3)
            expected = optimizer.state_dict()["state"]
            hvd.broadcast_parameters([parameter], root)
            if way != "not distributed":
                shard = {"shard": True if cls is torch.optim.NAdam else "parameters"} if way == "sharded" else {}
                optimizer = hvd.DistributedOptimizer(optimizer, **shard)
            hvd.broadcast_optimizer_state(optimizer, root)
            got = optimizer.state_dict()["state"]
            if hvd.rank() == root:
                torch.testing.assert_close(got, expected, rtol=0, atol=0)
        everybody = hvd.allgather_object(optimizer.state_dict()["state"])
        for other in everybody:
            torch.testing.assert_close(other, everybody[root], rtol=0, atol=0)
        if cls is Mixed:
            assert [everybody[0][0][name].dtype for name in ("master",)] == [torch.float64]
            assert everybody[0][0]["history"][0].dtype is torch.int8

    ranks(check)


class Lookahead(torch.optim.Optimizer):
    """As many programs have it: without torch's constructor (Zhang et al., arXiv:1907.08610)."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state, self.defaults = optimizer.state, optimizer.defaults
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}
        self.steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for parameter, slow in self.slow.items():
                parameter.copy_(slow.add_(parameter - slow, alpha=0.5))


@pytest.mark.parametrize("options", [{"overlap": False}, {"overlap": True}], ids=["plain", "overlapped"])
def test_optimizers_that_do_not_call_torchs_constructor(ranks: Any, options: Any) -> None:
    single = copy.deepcopy(MODEL)
    train(single, Lookahead(OPTIMIZERS["adam"](single.parameters())), slice(None), steps=5)

    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(Lookahead(OPTIMIZERS["adam"](model.parameters())), **options)
        train(model, optimizer, split(48, "uneven"), steps=5)
        assert distance(flat(model), flat(single)) <= 1e-5
        with pytest.raises(ArgumentError, match="Lookahead is not known to"):
            hvd.DistributedOptimizer(Lookahead(OPTIMIZERS["adam"](model.parameters())), shard=True)

    ranks(check)
    train(single, Lookahead(OPTIMIZERS["adam"](single.parameters())), slice(None), steps=1)  # others are left alone


class Counting(torch.nn.Linear):
    """A module with an extra state, as layers of float8 have."""

    def __init__(self, seen: object) -> None:
        super().__init__(2, 2)
        self.seen = seen

    def get_extra_state(self) -> object:
        return self.seen

    def set_extra_state(self, state: object) -> None:
        self.seen = state


@pytest.mark.parametrize("tensor", [False, True])
def test_extra_states_are_broadcast_to_a_model(ranks: Any, tensor: bool) -> None:
    def check() -> None:
        value = [float(hvd.rank()), 2.0]
        inner = Counting(torch.tensor(value) if tensor else value)
        model = torch.nn.Sequential(torch.nn.Sequential(inner), Counting("the same"))
        root = hvd.size() - 1
        hvd.broadcast_parameters(model, root)
        assert list(inner.seen) == [root, 2.0]  # type: ignore[call-overload]
        assert_equal_everywhere(flat(model))
        inner.seen = torch.tensor(value) if tensor else value
        if hvd.size() > 1:  # a state dict has a copy, so nothing can be set by it
            with pytest.raises(
                MismatchError, match=r"(?s)broadcast_parameters\(model\).*'0.0._extra_state' with checksum"
            ):
                hvd.broadcast_parameters(model.state_dict(), root)
        inner.seen = 7
        hvd.broadcast_parameters(model.state_dict(), root)

    ranks(check)


@every_way
def test_a_frozen_parameter_with_a_gradient_of_zeros(ranks: Any, options: Any) -> None:
    """torch moves it on by momentum and decay; shared out, it is an error with the way out."""

    def trained(optimizer: torch.optim.Optimizer, scale: float) -> list[torch.Tensor]:
        parameters = optimizer.param_groups[0]["params"]
        for step in range(6):
            if step == 3:
                parameters[1].requires_grad_(False)
            optimizer.zero_grad(set_to_none=False)
            (sum(parameter.sum() for parameter in parameters) * scale).backward()
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    def make() -> torch.optim.Optimizer:
        parameters = [torch.nn.Parameter(torch.full((length,), 0.5)) for length in (5000, 5000, 3)]
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)

    def check() -> None:
        optimizer = hvd.DistributedOptimizer(make(), **options)
        if options.get("shard") and hvd.size() > 1:
            with pytest.raises(ArgumentError, match=r"shape \(5000,\) is frozen .* zero_grad\(\) does"):
                trained(optimizer, hvd.rank() + 1.0)
        elif not options.get("shard"):
            torch.testing.assert_close(trained(optimizer, hvd.rank() + 1.0), trained(make(), (hvd.size() + 1) / 2))

    ranks(check)
