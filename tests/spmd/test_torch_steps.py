"""One exchange a step, whatever wraps `step` and whatever was loaded, and what a step within a step is."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError
from hvdlite_torch import horovod
from hvdlite_torch.sync.adasum import AdasumSync
from hvdlite_torch.sync.host import HostSync
from tests.spmd.test_torch_training import assert_equal_everywhere

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"overlap": False},
    "sharded": {"shard": True},
    "overlapped": {"overlap": True},
    "adasum": {"op": hvd.Adasum},
}
SPELLINGS = {"hvdlite_torch": hvd.DistributedOptimizer, "horovod.torch": horovod.DistributedOptimizer}
CANNOT_BE_SHARDED = (torch.optim.LBFGS, torch.optim.SparseAdam)

every_way = pytest.mark.parametrize("way", WAYS)
every_spelling = pytest.mark.parametrize("spelling", SPELLINGS)


def torchs_optimizers() -> list[type[torch.optim.Optimizer]]:
    found = [value for value in vars(torch.optim).values() if isinstance(value, type)]
    return [each for each in found if issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer]


class MySGD(torch.optim.SGD):
    """As programs have it, to log or to time steps."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.optim.Optimizer], int]:
    """How often an optimizer has exchanged on this rank."""
    counts: dict[int, int] = {}

    def count(method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(exchange: Any, *args: Any) -> Any:
            counts[id(exchange)] = counts.get(id(exchange), 0) + 1
            return method(exchange, *args)

        return counted

    monkeypatch.setattr(HostSync, "combine", count(HostSync.combine))
    monkeypatch.setattr(AdasumSync, "after_step", count(AdasumSync.after_step))
    return lambda optimizer: counts.get(id(optimizer._hvdlite_driver.sync), 0)


def backward(parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    index = torch.arange(12)
    for parameter in parameters:
        if isinstance(optimizer, torch.optim.SparseAdam):
            torch.nn.functional.embedding(index, parameter, sparse=True).sum().backward()
        else:
            (parameter.sum() * (hvd.rank() + 1)).backward()


def evaluate(evaluated: list[int]) -> torch.Tensor:
    evaluated.append(1)
    return torch.zeros(())


@every_way
@every_spelling
def test_as_many_exchanges_as_steps(ranks: Any, exchanges: Any, way: str, spelling: str) -> None:
    def check() -> None:
        for cls in torchs_optimizers():
            if way == "sharded" and issubclass(cls, CANNOT_BE_SHARDED):
                continue
            parameters = [torch.nn.Parameter(torch.zeros(12, 2)) for _ in range(3)]
            optimizer: Any = SPELLINGS[spelling](cls(parameters, lr=0.1), **WAYS[way])
            for event in (
                lambda its: None,
                lambda its: its.load_state_dict(its.state_dict()),
                lambda its: hvd.broadcast_optimizer_state(its, hvd.size() - 1),
                lambda its: hvd.join(),
            ):
                event(optimizer)
                evaluated: list[int] = []
                before = exchanges(optimizer)
                backward(parameters, optimizer)
                if cls is torch.optim.LBFGS:  # exchanges after each evaluation
                    optimizer.step(functools.partial(evaluate, evaluated))
                else:
                    optimizer.step()
                expected = 1 if way == "adasum" else len(evaluated) or 1
                assert exchanges(optimizer) - before == expected, cls

    ranks(check)


@every_spelling
def test_copies_are_plain_and_can_be_made_distributed(ranks: Any, exchanges: Any, spelling: str) -> None:
    def check() -> None:
        parameters = [torch.nn.Parameter(torch.zeros(12, 2)) for _ in range(3)]
        first: Any = SPELLINGS[spelling](torch.optim.SGD(parameters, lr=1.0, momentum=0.5), op=hvd.Sum)
        backward(parameters, first)
        first.step()
        for copied in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
            assert type(copied) is torch.optim.SGD
            its = copied.param_groups[0]["params"]
            backward(its, copied)
            copied.step()
            assert its[0].grad.eq(hvd.rank() + 1).all()
            again: Any = SPELLINGS[spelling](copied, op=hvd.Sum)
            backward(its, again)
            again.step()
            assert exchanges(again) == 1
            assert its[0].grad.eq(sum(range(1, hvd.size() + 1))).all()
        assert exchanges(first) == 1

    ranks(check)


@every_way
@every_spelling
@pytest.mark.parametrize("hooks", ["of the class", "of its base too", "of a scheduler"])
def test_a_step_that_calls_that_of_its_base(ranks: Any, exchanges: Any, way: str, spelling: str, hooks: str) -> None:
    def check() -> None:
        if hooks == "of its base too":
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # torch wraps SGD.step now
        parameters = [torch.nn.Parameter(torch.zeros(12, 2)) for _ in range(3)]
        plain = MySGD(parameters, lr=1.0)
        if hooks == "of a scheduler":
            torch.optim.lr_scheduler.ConstantLR(plain, 1.0)  # which puts a step of its own into the object
        seen = []
        options = {"shard": "parameters"} if way == "sharded" else WAYS[way]
        optimizer: Any = SPELLINGS[spelling](plain, **options)
        optimizer.register_step_post_hook(lambda *_: seen.append(parameters[0].detach().clone()))
        for step in range(1, 3):
            backward(parameters, optimizer)
            optimizer.step()
            assert exchanges(optimizer) == step
            assert seen[-1].equal(parameters[0])
            assert_equal_everywhere(parameters[0].detach())
            if way != "adasum":
                assert all(parameter.eq(-step * (hvd.size() + 1) / 2).all() for parameter in parameters)

    ranks(check)


def test_a_failed_step_within_a_step(ranks: Any, exchanges: Any) -> None:
    """The outer one goes on: what goes on after a step still does."""

    class Retries(torch.optim.SGD):
        fail = False

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            try:
                super().step(self._raise if self.fail else None)
            except ZeroDivisionError:
                super().step()

        def _raise(self) -> None:
            raise ZeroDivisionError

    def check() -> None:
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        for options in ({}, {"shard": "parameters"}):
            parameters = [torch.nn.Parameter(torch.zeros(12, 2))]
            optimizer: Any = hvd.DistributedOptimizer(Retries(parameters, lr=1.0), **options)
            for step, fail in enumerate((False, True, False), 1):
                optimizer.fail = fail
                backward(parameters, optimizer)
                optimizer.step()
                assert exchanges(optimizer) == step
                assert parameters[0].eq(-step * (hvd.size() + 1) / 2).all()
                assert optimizer.param_groups[0]["params"][0] is parameters[0]

    ranks(check)


@pytest.mark.parametrize("skip", [True, False])
@every_spelling
def test_a_closure_that_synchronizes(ranks: Any, exchanges: Any, spelling: str, skip: bool) -> None:
    """Within skip_synchronize(), as Lightning does, or without: one exchange for each evaluation."""

    def check() -> None:
        for op, expected in ((hvd.Sum, sum(range(1, hvd.size() + 1))), (hvd.Average, (hvd.size() + 1) / 2)):
            parameter = torch.nn.Parameter(torch.zeros(5000))
            optimizer: Any = SPELLINGS[spelling](torch.optim.SGD([parameter], lr=1.0), op=op)
            for step in range(1, 4):

                def closure(step: int = step, parameter: Any = parameter, optimizer: Any = optimizer) -> torch.Tensor:
                    backward([parameter], optimizer)
                    optimizer.synchronize()
                    return torch.tensor(float(hvd.rank()))

                with optimizer.skip_synchronize() if skip else contextlib.nullcontext():
                    loss = optimizer.step(closure)
                assert exchanges(optimizer) == step
                assert parameter.eq(-step * expected).all()
                # Horovod leaves the loss alone where it does not exchange.
                mean = (hvd.size() - 1) / 2
                assert loss == (hvd.rank() if skip else mean * (hvd.size() if op is hvd.Sum else 1))
            # And then without one: nothing is left of it.
            backward([parameter], optimizer)
            optimizer.step()
            assert exchanges(optimizer) == 4
            assert parameter.eq(-4 * expected).all()

    ranks(check)


def test_a_closure_that_does_not_synchronize_under_skip(ranks: Any, exchanges: Any) -> None:
    """Nobody exchanges, as the program has said."""

    def check() -> None:
        parameter = torch.nn.Parameter(torch.zeros(50))
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))

        def closure() -> None:
            backward([parameter], optimizer)

        with optimizer.skip_synchronize():
            optimizer.step(closure)
        assert exchanges(optimizer) == 0
        assert parameter.eq(-(hvd.rank() + 1)).all()
        hvd.barrier()

    ranks(check)


def test_a_sharded_optimizer_cannot_skip(ranks: Any) -> None:
    def check() -> None:
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(50))]), shard=True)
        with pytest.raises(ArgumentError, match=r"skip_synchronize\(\) has no meaning"), optimizer.skip_synchronize():
            pass

    ranks(check)
