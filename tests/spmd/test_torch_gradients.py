"""The blocking operations are differentiable: against the gradient of the same sums written with plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError

Inputs = list[torch.Tensor]

_generator = torch.Generator().manual_seed(3)
EQUAL = [torch.randn(4, 2, generator=_generator, dtype=torch.float64) for _ in range(8)]
RAGGED = [torch.randn(rows, 2, generator=_generator, dtype=torch.float64) for rows in (2, 0, 3, 1, 2, 1, 1, 1)]


def rows_of(tensor: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """The share of a rank: the first ones get a row more."""
    return torch.tensor_split(tensor, size)[rank]


def both(results: Any) -> torch.Tensor:
    """The results of a group of two as one tensor."""
    first, second = results
    return torch.cat([first.reshape(-1), second.reshape(-1)])


def of_both(one: Callable[[Inputs, int], torch.Tensor]) -> Callable[[Inputs, int], torch.Tensor]:
    """The truth for a group of x and of the first column of 3 x."""
    return lambda xs, r: both([one(xs, r), one([3 * x[:, 0] for x in xs], r)])


def group(x: torch.Tensor) -> list[torch.Tensor]:
    return [x, 3 * x[:, 0]]


def alltoall_ragged(x: torch.Tensor) -> torch.Tensor:
    """Everything goes to the next rank."""
    splits = [0] * hvd.size()
    splits[(hvd.rank() + 1) % hvd.size()] = len(x)
    rows, received = hvd.alltoall(x, splits=torch.tensor(splits))
    assert int(received.sum()) == len(rows)
    return rows


CASES: dict[str, tuple[Inputs, Callable[[torch.Tensor], torch.Tensor], Callable[[Inputs, int], torch.Tensor]]] = {
    # inputs, what a rank calls, and the same for rank r from everybody's inputs
    "allreduce sum": (EQUAL, lambda x: hvd.allreduce(x, op=hvd.Sum), lambda xs, r: torch.stack(xs).sum(0)),
    "allreduce average": (EQUAL, hvd.allreduce, lambda xs, r: torch.stack(xs).mean(0)),
    "allreduce scaled": (
        EQUAL,
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2, postscale_factor=3),
        lambda xs, r: 6 * torch.stack(xs).sum(0),
    ),
    "allreduce of a scalar": (
        [x[0, 0] for x in EQUAL],
        lambda x: hvd.allreduce(x, op=hvd.Sum),
        lambda xs, r: torch.stack(xs).sum(0),
    ),
    "allreduce of columns": (EQUAL, lambda x: hvd.allreduce(x.t()), lambda xs, r: torch.stack(xs).mean(0).t()),
    "grouped allreduce": (
        EQUAL,
        lambda x: both(hvd.grouped_allreduce(group(x), op=hvd.Sum)),
        of_both(lambda xs, r: torch.stack(xs).sum(0)),
    ),
    "allgather": (RAGGED, hvd.allgather, lambda xs, r: torch.cat(xs)),
    "allgather of scalars": ([x[0, 0] for x in EQUAL], hvd.allgather, lambda xs, r: torch.stack(xs)),
    "grouped allgather": (
        RAGGED,
        lambda x: both(hvd.grouped_allgather(group(x))),
        of_both(lambda xs, r: torch.cat(xs)),
    ),
    "broadcast": (EQUAL, lambda x: hvd.broadcast(x, hvd.size() - 1), lambda xs, r: xs[-1]),
    "reducescatter": (
        EQUAL,
        lambda x: hvd.reducescatter(x, op=hvd.Sum),
        lambda xs, r: rows_of(torch.stack(xs).sum(0), len(xs), r),
    ),
    "reducescatter average": (
        EQUAL,
        lambda x: hvd.reducescatter(x, prescale_factor=3, postscale_factor=2),
        lambda xs, r: 6 * rows_of(torch.stack(xs).mean(0), len(xs), r),
    ),
    "reducescatter of few rows": (
        [x[:2] for x in EQUAL],
        lambda x: hvd.reducescatter(x, op=hvd.Sum),
        lambda xs, r: rows_of(torch.stack(xs).sum(0), len(xs), r),
    ),
    "grouped reducescatter": (
        EQUAL,
        lambda x: both(hvd.grouped_reducescatter(group(x))),
        of_both(lambda xs, r: rows_of(torch.stack(xs).mean(0), len(xs), r)),
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
    "alltoall of ragged rows": (RAGGED, alltoall_ragged, lambda xs, r: xs[r - 1]),
}


def weights(result: torch.Tensor, rank: int) -> torch.Tensor:
    """Something that makes a loss of a rank's result, different for each element and rank."""
    return torch.linspace(1, 2, result.numel(), dtype=result.dtype).reshape(result.shape) * (rank + 1)


@pytest.mark.parametrize("case", CASES)
def test_gradients(ranks: Any, case: str) -> None:
    inputs, call, reference = CASES[case]

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        mine = inputs[rank].clone().requires_grad_()
        result = call(mine)
        (result * weights(result, rank)).sum().backward()

        # The sum of all ranks' losses, in one process, and its gradient.
        everybody = [x.clone().requires_grad_() for x in inputs[:size]]
        loss = torch.zeros((), dtype=torch.float64)
        for r in range(size):
            expected = reference(everybody, r)
            if r == rank:
                torch.testing.assert_close(result, expected)
            loss = loss + (expected * weights(expected, r)).sum()
        loss.backward()
        gradient = everybody[rank].grad
        torch.testing.assert_close(mine.grad, torch.zeros_like(mine) if gradient is None else gradient)

    ranks(check)


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_gradients(ranks: Any, case: str) -> None:
    """A penalty on the gradient, as of a sum of cubes, differentiated once more."""
    inputs, call, reference = CASES[case]

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        mine = inputs[rank].clone().requires_grad_()
        result = call(mine)
        (gradient,) = torch.autograd.grad((result**3 * weights(result, rank)).sum(), mine, create_graph=True)
        (gradient**2).sum().backward()

        everybody = [x.clone().requires_grad_() for x in inputs[:size]]
        results = [reference(everybody, r) for r in range(size)]
        loss = torch.stack([(y**3 * weights(y, r)).sum() for r, y in enumerate(results)]).sum()
        gradients = torch.autograd.grad(loss, everybody, create_graph=True, materialize_grads=True)
        penalty = torch.stack([(g**2).sum() for g in gradients]).sum()
        (expected,) = torch.autograd.grad(penalty, everybody[rank], materialize_grads=True)
        torch.testing.assert_close(mine.grad, expected)

    ranks(check)


@pytest.mark.ranks(at_least=3)
def test_in_a_process_set(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        pair = hvd.add_process_set([0, size - 1])
        if pair.included():
            x = torch.full((2,), float(rank + 1), dtype=torch.float64).requires_grad_()
            hvd.allreduce(x, process_set=pair).sum().backward()
            hvd.allgather(x, process_set=pair).sum().backward()
            hvd.broadcast(x, size - 1, process_set=pair).sum().backward()
            hvd.reducescatter(x, op=hvd.Sum, process_set=pair).sum().backward()
            hvd.alltoall(x, process_set=pair).sum().backward()
            # 1 of the average, 2 of the gather, 2 of the broadcast at its root, 1 of the scattered sum, 1 of the alltoall
            assert x.grad.tolist() == [7.0 if rank else 5.0] * 2
        hvd.remove_process_set(pair)

    ranks(check)


def test_a_group_may_hold_what_has_no_gradient(ranks: Any) -> None:
    def check() -> None:
        x = torch.ones(3, requires_grad=True)
        counts, fixed = torch.ones(2, dtype=torch.int64), torch.ones(1)
        results = hvd.grouped_allreduce([counts, x, fixed], op=hvd.Sum)
        assert [each.tolist() for each in results] == [[hvd.size()] * n for n in (2, 3, 1)]
        assert not results[0].requires_grad
        results[1].sum().backward()
        assert x.grad.tolist() == [hvd.size()] * 3
        assert counts.grad is None and fixed.grad is None

    ranks(check)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(ranks: Any, dtype: torch.dtype) -> None:
    def check() -> None:
        size = hvd.size()
        x = torch.ones(size, 2, dtype=dtype, requires_grad=True)
        for result in (hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x), hvd.reducescatter(x, op=hvd.Sum)):
            assert result.dtype is dtype
            result.sum().backward()
        assert x.grad.dtype is dtype
        assert x.grad.tolist() == [[2 * size + 1.0] * 2] * size

    ranks(check)


def test_extremes_have_no_gradient(ranks: Any) -> None:
    def check() -> None:
        for call in (hvd.allreduce, hvd.reducescatter):
            result = call(torch.ones(hvd.size(), requires_grad=True), op=hvd.Max)
            with pytest.raises(ArgumentError, match="not for Max"):
                result.sum().backward()

    ranks(check)


def test_nothing_is_recorded_where_nothing_is_wanted(ranks: Any) -> None:
    def check() -> None:
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            assert not hvd.allreduce(x).requires_grad
        assert not hvd.allreduce(x.detach()).requires_grad
        assert not hvd.synchronize(hvd.allreduce_async(x)).requires_grad
        assert not hvd.synchronize(hvd.allgather_async(x)).requires_grad

    ranks(check)


def test_in_place_forms_take_parameters(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        p = torch.nn.Parameter(torch.full((2,), rank + 1.0))
        assert hvd.allreduce_(p, op=hvd.Sum) is p
        assert p.tolist() == [size * (size + 1) / 2] * 2
        with torch.no_grad():
            p.fill_(rank)
        assert hvd.broadcast_(p, size - 1) is p
        assert p.tolist() == [size - 1.0] * 2
        assert p.is_leaf and p.requires_grad

    ranks(check)


def test_with_a_rank_that_has_joined(ranks: Any) -> None:
    """Rank 0 has no data: it adds nothing, and the others' gradients are as if it were not there."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        x = torch.full((size + 1, 2), float(rank), dtype=torch.float64, requires_grad=True)
        if rank:
            hvd.allgather(x[:rank]).sum().backward()
            hvd.broadcast(x, 1).sum().backward()
            hvd.reducescatter(x, op=hvd.Sum).sum().backward()
            others = size - 1
            expected = torch.zeros(size + 1, 2, dtype=torch.float64)
            expected[:rank] += others
            expected += others if rank == 1 else 0
            expected[2:] += 1  # the first two rows are rank 0's share, of which it makes nothing
            assert torch.equal(x.grad, expected)
        last = hvd.join()
        assert last in range(size) and last == hvd.broadcast_object(last)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_a_rank_that_joins_too_early(ranks: Any) -> None:
    def check() -> None:
        gathered = hvd.allgather(torch.ones(2, requires_grad=True))
        if hvd.rank():
            with pytest.raises(ArgumentError, match="join after the backward pass"):
                gathered.sum().backward()
        hvd.join()

    ranks(check)
