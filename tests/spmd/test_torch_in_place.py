"""Operations in place are changes in place for autograd. The truth is what torch's own operations do, and closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite_torch as hvd
from hvdlite.errors import UnsupportedTensorError
from tests.support.fake_device import fake_gpu

FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "allreduce_": lambda x: hvd.allreduce_(x, op=hvd.Sum),
    "allreduce_async_": lambda x: hvd.synchronize(hvd.allreduce_async_(x, op=hvd.Sum)),
    "grouped_allreduce_": lambda x: hvd.grouped_allreduce_([x], op=hvd.Sum),
    "grouped_allreduce_async_": lambda x: hvd.synchronize(hvd.grouped_allreduce_async_([x], op=hvd.Sum)),
    "broadcast_": lambda x: hvd.broadcast_(x, 0),
    "broadcast_async_": lambda x: hvd.synchronize(hvd.broadcast_async_(x, 0)),
}
LENGTHS = [1, 4, 40_000]


def check_version(form: str) -> None:
    for length in LENGTHS:
        for x in (torch.ones(length), torch.ones(length, 2)[:, 0]):
            weight = torch.ones(length, requires_grad=True)
            loss = (weight * x).sum()
            FORMS[form](x)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_that_autograd_has_saved(ranks: Any, form: str) -> None:
    ranks(check_version, form)


@pytest.mark.parametrize("form", ["allreduce_", "broadcast_async_"])
def test_a_tensor_on_a_gpu_that_autograd_has_saved(ranks: Any, form: str) -> None:
    def check() -> None:
        with fake_gpu() as gpu:
            x = gpu.ready(torch.ones(4))
            loss = (torch.ones(4, requires_grad=True) * x).sum()
            FORMS[form](x)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    ranks(check)


@pytest.mark.parametrize("form", FORMS)
def test_a_parameter_is_overwritten(ranks: Any, form: str) -> None:
    """What Horovod's programs do; torch's own changes in place want ``no_grad`` for it."""

    def check() -> None:
        parameter = torch.nn.Parameter(torch.full((4,), hvd.rank() + 1.0))
        FORMS[form](parameter)
        expected = 1.0 if "broadcast" in form else sum(range(1, hvd.size() + 1))
        assert parameter.tolist() == [expected] * 4
        assert parameter.is_leaf and parameter.requires_grad
        parameter.sum().backward()
        assert parameter.grad is not None and parameter.grad.tolist() == [1.0] * 4

    ranks(check)


def test_what_is_recorded_is_differentiable(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        x = torch.full((3,), rank + 1.0, requires_grad=True)
        y, leaf = x * x, torch.ones(2, requires_grad=True)
        assert hvd.allreduce_(y, op=hvd.Sum) is y
        assert y.tolist() == [sum(r * r for r in range(1, size + 1))] * 3
        y.sum().backward()
        # The gradient of the sum of all ranks' losses: each rank's loss has this rank's x once.
        assert x.grad is not None and x.grad.tolist() == [2.0 * (rank + 1) * size] * 3
        x.grad = None
        mixed = [x * 3.0, leaf, torch.full((2,), float(rank))]
        for result, given in zip(hvd.grouped_allreduce_(mixed, op=hvd.Average), mixed, strict=True):
            assert result is given
        assert mixed[2].tolist() == [(size - 1) / 2] * 2 and leaf.is_leaf
        mixed[0].sum().backward()
        assert x.grad.tolist() == [3.0] * 3
        x.grad = None
        z = x * 2.0
        assert hvd.broadcast_(z, size - 1) is z
        assert z.tolist() == [2.0 * size] * 3
        z.sum().backward()
        assert x.grad.tolist() == [2.0 * size if rank == size - 1 else 0.0] * 3

    ranks(check)


def test_what_cannot_be_recorded(ranks: Any) -> None:
    def check() -> None:
        y = torch.ones(3, requires_grad=True) * 2.0
        for start in (lambda: hvd.allreduce_async_(y), lambda: hvd.broadcast_async_(y, 0)):
            with pytest.raises(UnsupportedTensorError, match="use the blocking form, or tensor.detach"):
                start()
        with torch.no_grad():
            assert hvd.synchronize(hvd.allreduce_async_(y, op=hvd.Sum)) is y
        assert y.tolist() == [2.0 * hvd.size()] * 3
        with torch.inference_mode():
            x = torch.ones(3)
        assert hvd.allreduce_(x, op=hvd.Sum).tolist() == [float(hvd.size())] * 3
        loss = torch.full((1,), float(hvd.rank()), requires_grad=True) * 1.0
        loss.backward()
        hvd.allreduce_(loss)  # to be printed
        assert loss.item() == (hvd.size() - 1) / 2

    ranks(check)
