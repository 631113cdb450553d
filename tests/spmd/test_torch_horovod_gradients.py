"""Gradients of operations under Horovod's names, which are not ours: against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite_torch as own
from hvdlite_torch.horovod import operations as theirs


def gradient_of(operation: Callable[..., Any], rows: int, **options: Any) -> torch.Tensor:
    """That of ``(result × (1 + its number of the row)).sum()``, of this rank's loss alone times (1 + rank)."""
    x = torch.full((rows, 2), float(own.rank()), dtype=torch.float64, requires_grad=True)
    result = operation(x, **options)
    weights = torch.arange(1.0, len(result) + 1, dtype=torch.float64)[:, None]
    ((1 + own.rank()) * result * weights).sum().backward()
    assert x.grad is not None
    return x.grad[:, 0]


def test_gathered_rows(ranks: Any) -> None:
    def check() -> None:
        rank, size = own.rank(), own.size()
        numbers = torch.arange(1.0, 2 * size + 1, dtype=torch.float64)[2 * rank : 2 * rank + 2]
        truth = sum(range(1, size + 1)) * numbers  # the sum over the ranks of their losses' gradients
        torch.testing.assert_close(gradient_of(own.allgather, 2), truth)
        torch.testing.assert_close(gradient_of(theirs.allgather, 2), truth / size)
        grouped = gradient_of(lambda x: theirs.grouped_allgather(iter([x]))[0], 2)
        torch.testing.assert_close(grouped, truth / size)
        with torch.no_grad():
            assert theirs.allgather(torch.ones(1, requires_grad=True)).requires_grad is False

    ranks(check)


def test_results_can_be_written_into(ranks: Any) -> None:
    """As contrastive losses do, so that their own rows have an undivided gradient too."""

    def check() -> None:
        rank, size = own.rank(), own.size()
        x = torch.ones(1, dtype=torch.float64, requires_grad=True)
        gathered = theirs.allgather(x)
        gathered[rank] = 3 * x[0]
        gathered.sum().backward()
        # Each rank's loss has this rank's row, but for its own loss, where three times x took its place.
        assert x.grad is not None and x.grad.item() == pytest.approx(3 + (size - 1) / size)

    ranks(check)


def test_sent_and_scattered(ranks: Any) -> None:
    def check() -> None:
        rank, size = own.rank(), own.size()
        everybody = sum(range(1, size + 1))
        root = size - 1
        truth = everybody * torch.tensor([1.0, 2.0], dtype=torch.float64) * (rank == root)
        torch.testing.assert_close(gradient_of(theirs.broadcast, 2, root_rank=root), truth / size)
        # Row r of the sum is rank r's, whose loss counts 1 + r times; Average divides by the number of ranks.
        truth = torch.arange(1.0, size + 1, dtype=torch.float64)
        scattered = gradient_of(theirs.reducescatter, size, op=own.Sum)
        torch.testing.assert_close(scattered, truth * size)
        torch.testing.assert_close(gradient_of(own.reducescatter, size, op=own.Sum), truth)
        torch.testing.assert_close(gradient_of(theirs.reducescatter, size, op=own.Average), truth)
        grouped = gradient_of(lambda x: theirs.grouped_reducescatter([x], op=own.Average)[0], size)
        torch.testing.assert_close(grouped, truth)

    ranks(check)


def test_second_derivatives(ranks: Any) -> None:
    def check() -> None:
        size = own.size()
        x = torch.full((1,), 2.0, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad((theirs.allgather(x) ** 3).sum(), x, create_graph=True)
        assert first.item() == pytest.approx(3 * 2.0**2)  # n losses, divided by n
        (second,) = torch.autograd.grad(first.sum(), x)
        assert second.item() == pytest.approx(6 * 2.0 / size)  # n losses, divided by n twice

    ranks(check)


def test_wrong_arguments(ranks: Any) -> None:
    def check() -> None:
        with pytest.raises(own.ArgumentError, match="a grouped operation takes a list"):
            theirs.grouped_allgather(torch.ones(1))  # type: ignore[arg-type]
        with pytest.raises(own.UnsupportedTensorError, match="expected"):
            theirs.allgather("x")
        with pytest.raises(TypeError, match="tensor"):
            theirs.allgather()  # type: ignore[call-arg]

    ranks(check)
