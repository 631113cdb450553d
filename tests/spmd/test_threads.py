"""Threads of each rank that train at the same time: right, or an error that says that the ranks cannot tell them apart."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite
import hvdlite_torch as hvd
from hvdlite.adapter.gradient_memory import Registry
from hvdlite.api import world
from hvdlite.errors import HvdliteError, MismatchError

STEPS = 6


def model_of(number: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(number)  # torch's own is one for all threads
    model = torch.nn.Sequential(torch.nn.Linear(300, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def batch(number: int, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + 10 * step + rank)
    return torch.randn(4, 300, generator=generator), torch.randn(4, 1, generator=generator)


def step(model: torch.nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05)


def one_process(number: int, size: int) -> torch.nn.Module:
    model = model_of(number)
    optimizer = sgd(model)
    for each in range(STEPS):
        x, y = zip(*(batch(number, rank, each) for rank in range(size)), strict=True)
        step(model, optimizer, torch.cat(x), torch.cat(y))
    return model


def in_threads(*work: Callable[[], None]) -> list[BaseException | None]:
    """Run functions in a thread each, and return what each raised. The ranks start them in different orders."""
    errors: list[BaseException | None] = [None] * len(work)

    def run(number: int) -> None:
        try:
            work[number]()
        except BaseException as error:
            errors[number] = error

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, number), name=f"work {number}")
        for number in range(len(work))
    ]
    ordered = threads if hvd.rank() % 2 == 0 else threads[::-1]
    for thread in ordered:
        thread.start()
    for thread in ordered:
        thread.join()
    return errors


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("shard", [False, True])
def test_optimizers_that_threads_step(ranks: Any, shard: bool) -> None:
    """They are made in one order on all ranks, and stepped in any."""

    def check() -> None:
        models = [model_of(number) for number in range(2)]
        optimizers = [hvd.DistributedOptimizer(sgd(model), shard=shard) for model in models]

        def train(number: int) -> None:
            for each in range(STEPS):
                step(models[number], optimizers[number], *batch(number, hvd.rank(), each))

        assert in_threads(lambda: train(0), lambda: train(1)) == [None, None]
        for number, model in enumerate(models):
            for got, expected in zip(model.parameters(), one_process(number, hvd.size()).parameters(), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_optimizers_that_threads_make(ranks: Any) -> None:
    """In different orders, which all ranks are told."""

    def check() -> None:
        earlier, later = (0, 1) if hvd.rank() % 2 == 0 else (1, 0)
        one_is_made, other_is_refused = threading.Event(), threading.Event()

        def make() -> None:
            hvd.DistributedOptimizer(sgd(model_of(0)))
            one_is_made.set()
            assert other_is_refused.wait(60)

        def make_another() -> None:
            try:
                assert one_is_made.wait(60)
                hvd.DistributedOptimizer(sgd(model_of(0)))
            finally:
                other_is_refused.set()

        errors = in_threads(*(make if number == earlier else make_another for number in range(2)))
        assert errors[earlier] is None
        assert isinstance(errors[later], MismatchError)
        assert "made in=\"thread 'work" in str(errors[later])

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_gradients_of_threads(ranks: Any) -> None:
    """Those of equal shapes share their memory within a process set. With a set each they do not."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        sets = [hvdlite.new_group(range(size)) for _ in range(2)]

        def combine(number: int, process_set: Any) -> None:
            combine = hvdlite.DistributedGradient(process_set=process_set)
            for each in range(20):
                found = combine([np.full(5000, 100.0 * number + rank + each)])[0]
                np.testing.assert_allclose(found, 100.0 * number + each + (size - 1) / 2)

        assert in_threads(lambda: combine(0, sets[0]), lambda: combine(1, sets[1])) == [None, None]
        for each in sets:
            hvdlite.remove_process_set(each)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_two_threads_in_one_exchange(ranks: Any) -> None:
    """Of gradients that share their memory: the second one raises, before it has written there."""

    def check() -> None:
        combine = hvdlite.DistributedGradient()
        combine([np.ones(3)])
        buckets = list(Registry.of(world(), None)._buckets.values())[-1]
        with buckets._alone(), pytest.raises(HvdliteError, match="two threads of this rank exchange gradients"):
            combine([np.ones(3)])
        np.testing.assert_array_equal(combine([np.ones(3)])[0], 1.0)

    ranks(check)
