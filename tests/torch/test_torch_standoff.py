"""One rank alone does something else than the others: the job ends, and all say what each waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.gradients.bucket
import hvdlite_torch as hvd
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.testing import on_ranks
from tests.spmd.test_torch_training import every_way


def ones(count: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(count))


def frozen(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    parameters[0].requires_grad_(False)
    optimizer.step()


def added(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    optimizer.add_param_group({"params": [ones(2)]})
    optimizer.step()


def skipped(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    hvd.barrier()


def backward_once_too_often(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    parameters[0].sum().backward()
    with pytest.raises(ArgumentError, match="3 backward passes without a step"):
        parameters[0].sum().backward()
    hvd.barrier()


@every_way
@pytest.mark.parametrize(
    ("oddity", "steps"), [(frozen, 0), (frozen, 5), (added, 5), (skipped, 5), (backward_once_too_often, 0)]
)
def test_one_rank_alone(oddity: Callable[..., None], steps: int, options: dict[str, Any]) -> None:
    def check() -> None:
        parameters = [ones(40), ones(40)]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2, **options)
        for step in range(steps + 1):
            optimizer.zero_grad()
            (parameters[0].sum() + parameters[1].sum()).backward()
            if step == steps and hvd.rank() == 0:
                oddity(optimizer, parameters)
            else:
                optimizer.step()
        hvd.barrier()

    with pytest.raises(HvdliteError) as caught:
        on_ranks(3, check, config=Config(deadlock_time_seconds=0.3, advice=False), timeout=30)
    text = f"{caught.value} {caught.value.__cause__}"
    assert "two ranks wait for each other, so neither can go on:\n  rank 0 waits for" in text
    assert f"waits for gradient exchange {steps + 1}" in text


def test_one_rank_alone_while_a_thread_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program waits for a thread, which waits for the other rank."""
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", 0)

    def check() -> None:
        parameters = [ones(40), ones(40), ones(40)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), overlap=True)
        for step in range(6):
            optimizer.zero_grad()
            sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]
            if step == 5 and hvd.rank() == 1:
                hvd.barrier()  # while its thread exchanges what the backward pass has made
            optimizer.step()
        if hvd.rank() == 0:
            sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]
            optimizer.step()
        hvd.barrier()

    with pytest.raises(HvdliteError) as caught:
        on_ranks(2, check, config=Config(deadlock_time_seconds=0.3, advice=False), timeout=30)
    assert "two ranks wait for each other, so neither can go on:" in f"{caught.value} {caught.value.__cause__}"
