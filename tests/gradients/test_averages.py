"""Averages of gradients fit where their sums do not, on one host and between hosts, whichever way they take."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import hvdlite
import hvdlite.gradients.bucket
import hvdlite_torch as hvd
from hvdlite.config import Config
from hvdlite.testing import on_ranks

HOSTS = [[0, 0, 0], [0, 0, 1, 1], [0, 1, 1], [0, 1, 2]]


@pytest.fixture(params=[0, 2**14], ids=["large", "small"], autouse=True)
def large(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether arrays are summed where the program has them."""
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", request.param)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
def test_arrays(hosts: list[int], dtype: Any, inplace: bool) -> None:
    """Infinities of the program stay what they are."""
    most, many = float(ml_dtypes.finfo(dtype).max), 9000  # more than travel as float32

    def check() -> None:
        rank, size = hvdlite.rank(), hvdlite.size()
        combine = hvdlite.DistributedGradient(inplace=inplace)
        for weighted in (False, True, False):
            weights = np.arange(1, size + 1) * 8.0 if weighted else np.ones(size)
            signs = (-1.0) ** np.arange(size)
            own = np.array([1, -1, signs[rank], np.inf if rank == 0 else 1, 2.0**-60]) * most
            found = combine(np.concatenate([own, np.full(many, most / 2)]).astype(dtype), weight=weights[rank])
            mean = (weights * signs).sum() / weights.sum()
            expected = np.concatenate([[1, -1, mean, np.inf, 2.0**-60], np.full(many, 0.5)])
            np.testing.assert_allclose(
                found.astype(np.float64) / most, expected, rtol=2e-2 if dtype is ml_dtypes.bfloat16 else 1e-6
            )

    on_ranks(len(hosts), check, hosts=hosts, config=Config(advice=False))


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("options", [{}, {"shard": True}, {"overlap": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps(hosts: list[int], options: dict[str, Any], dtype: torch.dtype) -> None:
    most, rate = torch.finfo(dtype).max, 2.0**-100

    def check() -> None:
        weights = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in ((70, 70), (3,))]
        optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=rate), **options)
        for step in range(1, 4):
            optimizer.zero_grad()
            optimizer.set_batch_weight(4.0 if step == 3 else 1.0)
            for weight in weights:
                (weight * most).sum().backward()
            optimizer.step()
            for weight in weights:
                torch.testing.assert_close(
                    weight.double(), torch.full_like(weight, -step * most * rate).double(), rtol=2e-2, atol=0.0
                )

    on_ranks(len(hosts), check, hosts=hosts, config=Config(advice=False))
