"""The state of a sharded optimizer comes from who has it; and which optimizers can be sharded at all."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, MismatchError
from hvdlite_torch.step.shardable import ELEMENTWISE, PARAMETERWISE, UNSHARDABLE
from tests.spmd.test_torch_training import MODEL, X, Y, assert_equal_everywhere, distance, flat, split, train

MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-1),  # has a state from the first
}


def begun(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Half of the training in one process."""
    model = copy.deepcopy(MODEL)
    optimizer = MAKE[kind](model.parameters())
    train(model, optimizer, slice(None), steps=5)
    return model, optimizer


@pytest.mark.parametrize("load", ["wrapped", "before it is wrapped"])
@pytest.mark.parametrize("kind", MAKE)
def test_one_rank_loads_and_broadcasts(ranks: Any, kind: str, load: str) -> None:
    """As Horovod's programs resume."""
    half, plain = begun(kind)
    checkpoint = copy.deepcopy(plain.state_dict())
    single = copy.deepcopy(half)
    alone = MAKE[kind](single.parameters())
    alone.load_state_dict(copy.deepcopy(checkpoint))
    train(single, alone, slice(None), steps=5)

    def check() -> None:
        root = hvd.size() - 1
        model = copy.deepcopy(MODEL)
        optimizer = MAKE[kind](model.parameters())
        if load == "wrapped":
            optimizer = hvd.DistributedOptimizer(optimizer, shard=True)
        hvd.barrier()
        if hvd.rank() == root:
            model.load_state_dict(half.state_dict())
            optimizer.load_state_dict(copy.deepcopy(checkpoint))
        hvd.broadcast_parameters(model.state_dict(), root)
        if load != "wrapped":
            optimizer = hvd.DistributedOptimizer(optimizer, shard=True)
        hvd.broadcast_optimizer_state(optimizer, root)
        state = optimizer.state_dict()
        torch.testing.assert_close(state, checkpoint, rtol=0, atol=0)
        assert_equal_everywhere(flat(model))
        train(model, optimizer, split(48, "uneven"), steps=5)
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


@pytest.mark.parametrize("load", ["wrapped", "before it is wrapped"])
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("then", ["step", "state_dict", "broadcast from another"])
def test_one_rank_loads_and_the_others_do_not_know(ranks: Any, kind: str, load: str, then: str) -> None:
    _, plain = begun(kind)
    checkpoint = plain.state_dict()

    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = MAKE[kind](model.parameters())
        if load == "wrapped":
            optimizer = hvd.DistributedOptimizer(optimizer, shard=True)
            hvd.broadcast_optimizer_state(optimizer)
        if hvd.rank() == 0:
            optimizer.load_state_dict(copy.deepcopy(checkpoint))
        if load != "wrapped":
            optimizer = hvd.DistributedOptimizer(optimizer, shard=True)
        if hvd.size() == 1:
            train(model, optimizer, slice(None), steps=1)
        elif then == "step":
            with pytest.raises(MismatchError, match=r"(?s)rank 0: its state is .*broadcast_optimizer_state"):
                train(model, optimizer, split(48, "equal"), steps=1)
        elif then == "state_dict":
            with pytest.raises(ArgumentError, match=r"(?s)rank 0: .*\n.*rank.* 1.*: .*on every rank"):
                optimizer.state_dict()
        elif kind != "adagrad" or load == "wrapped":
            with pytest.raises(ArgumentError, match="have not loaded the same state"):
                hvd.broadcast_optimizer_state(optimizer, 1)
        else:  # rank 1 has the state that it has made: everybody gets that
            hvd.broadcast_optimizer_state(optimizer, 1)
            assert all(state["step"] == 0 for state in optimizer.state_dict()["state"].values())

    ranks(check)


def test_state_that_one_rank_has_deleted_is_missed(ranks: Any) -> None:
    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(MAKE["adam"](model.parameters()), shard=True)
        train(model, optimizer, split(48, "equal"), steps=2)
        if hvd.rank() == 0:
            optimizer.state.clear()
        if hvd.size() == 1 or not hvd.is_homogeneous():
            return
        with pytest.raises(ArgumentError, match="parts are missing: only rank"):
            optimizer.state_dict()

    ranks(check)


def test_parts_stay_equal_when_they_are_dealt_out_anew(ranks: Any) -> None:
    def check() -> None:
        parameters = [torch.nn.Parameter(torch.zeros(length)) for length in (6000, 10, 10)]
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(parameters[:2]), shard=True)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [parameters[2]]})
            optimizer.zero_grad()
            sum(parameter.sum() for parameter in parameters).backward()
            optimizer.step()
        held = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.dim())
        assert sum(hvd.allgather_object(held)) == 2 * 6020
        if hvd.is_homogeneous():
            assert held <= 2 * (6020 / hvd.size() + 64)

    ranks(check)


@pytest.mark.parametrize("what", ["nan", "inf", "too large to be squared", "large"])
@pytest.mark.parametrize("options", [{"overlap": False}, {"shard": True}], ids=["whole", "sharded"])
def test_clipping_what_has_no_norm(ranks: Any, options: Any, what: str) -> None:
    value = {"nan": float("nan"), "inf": float("inf"), "too large to be squared": 1e200, "large": 1e100}[what]

    def trained(wrap: bool) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(torch.zeros(5000, dtype=torch.float64)) for _ in range(3)]
        optimizer: Any = torch.optim.SGD(parameters, lr=1.0)
        if wrap:
            optimizer = hvd.DistributedOptimizer(optimizer, max_grad_norm=1.0, **options)
        (100 * sum(parameter.sum() for parameter in parameters)).backward()
        assert parameters[0].grad is not None
        parameters[0].grad[7] = value
        if not wrap:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return [parameter.detach() for parameter in parameters]

    def check() -> None:
        torch.testing.assert_close(trained(wrap=True), trained(wrap=False), equal_nan=True)

    ranks(check)


# Which optimizers can be sharded


def test_all_of_torch_are_known() -> None:
    found = {value for value in vars(torch.optim).values() if isinstance(value, type)}
    found = {each for each in found if issubclass(each, torch.optim.Optimizer)} - {torch.optim.Optimizer}
    assert found == ELEMENTWISE | PARAMETERWISE | set(UNSHARDABLE)


@pytest.mark.parametrize("cls", sorted(PARAMETERWISE, key=lambda cls: cls.__name__), ids=lambda cls: cls.__name__)
def test_optimizers_that_need_whole_parameters(ranks: Any, cls: Any) -> None:
    """Muon takes matrices only."""
    start = [torch.randn(12, 20, generator=torch.Generator().manual_seed(3)) / 9 for _ in range(2)]

    def step(parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer, rows: slice) -> None:
        optimizer.zero_grad()
        x = X[rows]
        (torch.tanh(x @ parameters[0][:10]) @ parameters[1][:, :20].t()).square().mean().backward()
        optimizer.step()

    single = [torch.nn.Parameter(each.clone()) for each in start]
    alone = cls(single, lr=1e-2)
    for _ in range(4):
        step(single, alone, slice(None))

    def check() -> None:
        parameters = [torch.nn.Parameter(each.clone()) for each in start]
        optimizer = hvd.DistributedOptimizer(cls(parameters, lr=1e-2), shard=True)
        for _ in range(4):
            step(parameters, optimizer, split(48, "equal"))
        torch.testing.assert_close(parameters, single, rtol=1e-4, atol=1e-5)

    ranks(check)


class Unlike(torch.optim.Optimizer):
    """A base for optimizers that are none of torch's."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.1, **settings: Any) -> None:
        super().__init__(parameters, {"lr": lr, **settings})


class Alone(Unlike):
    """Each parameter by itself, by its own norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (parameter.grad.norm() + 1) * group["lr"])


class Normalized(Unlike):
    """By the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / norm.clamp(min=1.0) * group["lr"])


class Adapting(Unlike):
    """Finds its rate by all gradients, as Prodigy does, and uses it late."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["d"] = group.get("d", 0.0) + sum(
                float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None
            )
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * group["lr"])


class InAList(Unlike):
    """Keeps its parameters elsewhere, too."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        self.all = list(parameters)
        super().__init__(self.all)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.all:
            parameter.sub_(parameter.grad)


class Closes(Unlike):
    """Cannot be tried out."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad)
        return loss


class OtherConstructor(torch.optim.Adam):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=1e-2)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)

    def report(self) -> int:
        return len(self.state)


class OtherStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("cls", [Alone, Normalized, Adapting, InAList, Closes, OtherStep])
def test_what_is_not_known_is_asked_for(ranks: Any, cls: type[torch.optim.Optimizer]) -> None:
    def check() -> None:
        with pytest.raises(ArgumentError, match=f'{cls.__name__} is not known to .*say so: shard="parameters"'):
            hvd.DistributedOptimizer(cls(copy.deepcopy(MODEL).parameters()), shard=True)  # type: ignore[call-arg]

    ranks(check)


@pytest.mark.parametrize(
    ("cls", "difference"),
    [(Normalized, "changes one of shape .* in another way"), (Adapting, "other settings"), (InAList, "fails for one")],
)
def test_what_is_asked_for_is_tried_out(ranks: Any, cls: Any, difference: str) -> None:
    def check() -> None:
        with pytest.raises(ArgumentError, match=f"does not step each parameter by itself.*{difference}"):
            hvd.DistributedOptimizer(cls(copy.deepcopy(MODEL).parameters()), shard="parameters")

    ranks(check)


@pytest.mark.parametrize(
    ("make", "shard"),
    [
        (lambda model: Alone(model.parameters()), "parameters"),
        (lambda model: Closes(model.parameters()), "parameters"),
        (lambda model: OtherStep(model.parameters(), lr=0.1, momentum=0.9), "parameters"),
        (lambda model: torch.optim.Adam(model.parameters(), lr=1e-2), "parameters"),
        (OtherConstructor, True),
    ],
    ids=["own norm", "closure", "other step", "whole parameters of Adam", "other constructor"],
)
def test_what_may_be_sharded_equals_one_process(ranks: Any, make: Any, shard: Any) -> None:
    def closure(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: slice) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X[rows]), Y[rows])
        loss.backward()
        return loss

    single = copy.deepcopy(MODEL)
    alone = make(single)
    for _ in range(5):
        alone.step(functools.partial(closure, single, alone, slice(None)))

    def check() -> None:
        model = copy.deepcopy(MODEL)
        plain = make(model)
        before = torch.random.get_rng_state()
        optimizer = hvd.DistributedOptimizer(plain, shard=shard)
        if hvd.size() == 1:  # ranks that are threads share it
            assert torch.random.get_rng_state().equal(before)
        assert distance(flat(model), flat(MODEL)) == 0
        for _ in range(5):
            optimizer.step(functools.partial(closure, model, optimizer, split(48, "equal")))
        assert distance(flat(model), flat(single)) <= 1e-5

    ranks(check)


def test_shard_is_true_false_or_a_word(ranks: Any) -> None:
    def check() -> None:
        with pytest.raises(ArgumentError, match=r"shard='elements': expected True, False or \"parameters\""):
            hvd.DistributedOptimizer(torch.optim.SGD(MODEL.parameters()), shard="elements")  # type: ignore[arg-type]

    ranks(check)


def test_a_rank_that_has_joined_keeps_its_shard(ranks: Any) -> None:
    """Nobody can have the whole state then."""

    def check() -> None:
        model = copy.deepcopy(MODEL)
        optimizer = hvd.DistributedOptimizer(MAKE["adam"](model.parameters()), shard=True)
        train(model, optimizer, split(len(X), "equal"), steps=1)
        last = hvd.size() - 1
        if hvd.rank() != last:
            with pytest.raises(
                ArgumentError, match=f"cannot be had, because rank {last} has joined, which has its part"
            ):
                optimizer.state_dict()
        hvd.join()
        optimizer.state_dict()

    ranks(check)
