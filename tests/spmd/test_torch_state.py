"""What becomes of an optimizer's state and of its parameters: as in one process, or an error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hvdlite_torch as hvd
from tests.spmd.test_torch_training import every_way


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
