"""The blocking operations are differentiable: against the gradient of the same sums written with plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite_torch as hvd
from hvdlite.errors import HvdliteError

Inputs = list[torch.Tensor]

_generator = torch.Generator().manual_seed(3)
EQUAL = [torch.randn(4, 2, generator=_generator, dtype=torch.float64) for _ in range(8)]
RAGGED = [torch.randn(rows, 2, generator=_generator, dtype=torch.float64) for rows in (2, 0, 3, 1, 2, 1, 1, 1)]


def rows_of(tensor: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """The share of a rank: the first ones get a row more."""
    return torch.tensor_split(tensor, size)[rank]


CASES: dict[str, tuple[Inputs, Callable[[torch.Tensor], torch.Tensor], Callable[[Inputs, int], torch.Tensor]]] = {
    # inputs, what a rank calls, and the same for rank r from everybody's inputs
    "allreduce sum": (EQUAL, lambda x: hvd.allreduce(x, hvd.Sum), lambda xs, r: torch.stack(xs).sum(0)),
    "allreduce average": (EQUAL, hvd.allreduce, lambda xs, r: torch.stack(xs).mean(0)),
    "allreduce scaled": (
        EQUAL,
        lambda x: hvd.allreduce(x, hvd.Sum, prescale_factor=2, postscale_factor=3),
        lambda xs, r: 6 * torch.stack(xs).sum(0),
    ),
    "allreduce of a list": (
        EQUAL,
        lambda x: sum(hvd.allreduce([x, 2 * x], hvd.Sum)),
        lambda xs, r: 3 * torch.stack(xs).sum(0),
    ),
    "allgather": (RAGGED, hvd.allgather, lambda xs, r: torch.cat(xs)),
    "allgather of scalars": ([x[0, 0] for x in EQUAL], hvd.allgather, lambda xs, r: torch.stack(xs)),
    "broadcast": (EQUAL, lambda x: hvd.broadcast(x, hvd.size() - 1), lambda xs, r: xs[-1]),
    "reducescatter": (
        EQUAL,
        lambda x: hvd.reducescatter(x, hvd.Sum),
        lambda xs, r: rows_of(torch.stack(xs).sum(0), len(xs), r),
    ),
    "reducescatter average": (
        EQUAL,
        lambda x: hvd.reducescatter(x, postscale_factor=2),
        lambda xs, r: 2 * rows_of(torch.stack(xs).mean(0), len(xs), r),
    ),
    "alltoall": (
        [x.repeat(6, 1) for x in EQUAL],
        hvd.alltoall,
        lambda xs, r: torch.cat([x.chunk(len(xs))[r] for x in xs]),
    ),
    "alltoall with splits": (
        EQUAL,
        lambda x: hvd.alltoall(x, [4] + [0] * (hvd.size() - 1))[0],
        lambda xs, r: torch.cat(xs) if r == 0 else xs[0][:0],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients(ranks: Any, case: str) -> None:
    inputs, call, reference = CASES[case]

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        mine = inputs[rank].clone().requires_grad_()
        result = call(mine)
        weights = torch.linspace(1, 2, result.numel(), dtype=torch.float64).reshape(result.shape) * (rank + 1)
        (result * weights).sum().backward()

        # The sum of all ranks' losses, in one process, and its gradient.
        everybody = [x.clone().requires_grad_() for x in inputs[:size]]
        loss = torch.zeros((), dtype=torch.float64)
        for r in range(size):
            expected = reference(everybody, r)
            if r == rank:
                torch.testing.assert_close(result, expected)
            factors = torch.linspace(1, 2, expected.numel(), dtype=torch.float64).reshape(expected.shape) * (r + 1)
            loss = loss + (expected * factors).sum()
        loss.backward()
        gradient = everybody[rank].grad
        torch.testing.assert_close(mine.grad, torch.zeros_like(mine) if gradient is None else gradient)

    ranks(check)


def test_extremes_have_no_gradient(ranks: Any) -> None:
    def check() -> None:
        x = torch.ones(2, requires_grad=True)
        result = hvd.allreduce(x, hvd.Max)
        with pytest.raises(HvdliteError, match="not for Max"):
            result.sum().backward()

    ranks(check)


def test_nothing_is_recorded_where_nothing_is_wanted(ranks: Any) -> None:
    def check() -> None:
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            assert not hvd.allreduce(x).requires_grad
        assert not hvd.allreduce(x.detach()).requires_grad
        assert hvd.allreduce(torch.ones(2), inplace=True).tolist() == [1, 1]
        assert hvd.alltoall([torch.arange(hvd.size())])[0].tolist() == [hvd.rank()] * hvd.size()

    ranks(check)
