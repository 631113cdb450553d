"""A program's own way to combine gradients: called once in a step on every rank, with a state that is saved."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite.gradients.bucket
import hvdlite_torch as hvd
from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.protocols import Collectives, ReduceOp

SHAPES = (40, 3), (7,), (2, 2, 2)
STEPS = 4
DTYPES = torch.float32, torch.float64, torch.bfloat16


@pytest.fixture(autouse=True, params=[0, 2**16], ids=["large", "small"])
def large_or_small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", request.param)


class Mean:
    """The weighted mean, by messages; and what it was called with."""

    def __init__(self) -> None:
        self.weights: list[hvd.Weights] = []
        self.dtypes: set[str] = set()

    def aggregate(self, bucket: hvd.FlatBucket, weights: hvd.Weights, collectives: Collectives) -> None:
        self.weights.append(weights)
        assert sum(each.size for each in bucket.arrays) >= sum(each.size for each in bucket.tensors.values())
        for array in bucket.arrays:
            self.dtypes.add(array.dtype.name)
            array *= weights.own / weights.total
            collectives.allreduce(array, ReduceOp.SUM)


class Sign:
    """Scaled signs with error feedback, by tensor (Karimireddy et al., arXiv:1901.09847)."""

    def __init__(self) -> None:
        self.lost: dict[int, np.ndarray] = {}

    def aggregate(self, bucket: hvd.FlatBucket, weights: hvd.Weights, collectives: Collectives) -> None:
        for number, gradient in sorted(bucket.tensors.items()):
            sent, self.lost[number] = sign(gradient + self.lost.get(number, 0))
            mean = np.ascontiguousarray(sent).reshape(-1) / collectives.size
            collectives.allreduce(mean, ReduceOp.SUM)
            gradient[...] = mean.reshape(gradient.shape)

    def state_dict(self) -> dict[int, np.ndarray]:
        return copy.deepcopy(self.lost)

    def load_state_dict(self, state: dict[int, np.ndarray]) -> None:
        self.lost = copy.deepcopy(state)


def sign(wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    sent = np.sign(wanted) * np.abs(wanted).mean()
    return sent, wanted - sent


def gradient_of(rank: int, step: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    return torch.randn(SHAPES[number], generator=generator, dtype=torch.float64)


def parameters(dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]


def sgd(given: list[torch.nn.Parameter], aggregator: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(given, lr=1.0), aggregator=aggregator, **options)


def run(given: list[torch.nn.Parameter], optimizer: Any, step: int, numbers: Any = (0, 1, 2)) -> None:
    """A step with the gradients of these parameters."""
    optimizer.zero_grad()
    for number in numbers:
        (given[number] * gradient_of(hvd.rank(), step, number).to(given[number].dtype)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weighted_mean(ranks: Any, dtype: torch.dtype) -> None:
    """The mean is that of all samples, of a rank without samples too, and rounded once."""

    def check() -> None:
        aggregator, given = Mean(), parameters(dtype)
        optimizer = sgd(given, aggregator)
        weights = [3.0, 0.0, 2.0][: hvd.size()]
        expected = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        for step in range(STEPS):
            optimizer.set_batch_weight(weights[hvd.rank()])
            run(given, optimizer, step, () if weights[hvd.rank()] == 0 else range(3))
            for number, parameter in enumerate(given):
                terms = [w * gradient_of(r, step, number).to(dtype).double() for r, w in enumerate(weights)]
                expected[number] -= sum(terms) / sum(weights)
                tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.06}[dtype]
                torch.testing.assert_close(parameter.detach().double(), expected[number], rtol=0, atol=tolerance)
        assert aggregator.weights == [hvd.Weights(weights[hvd.rank()], sum(weights))] * STEPS
        assert aggregator.dtypes == {"float64" if dtype is torch.float64 else "float32"}

    ranks(check)


def test_error_feedback_and_its_state(ranks: Any) -> None:
    """Against NumPy; the run is broken off after two steps and goes on from its state with new objects."""

    def check() -> None:
        aggregator, given = Sign(), parameters()
        optimizer = sgd(given, aggregator)
        lost: dict[tuple[int, int], Any] = {}
        expected = [np.zeros(shape) for shape in SHAPES]
        for step in range(STEPS):
            if step == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                assert saved["aggregator"].keys() == {0, 1, 2}
                aggregator, given = Sign(), [torch.nn.Parameter(p.detach().clone()) for p in given]
                optimizer = sgd(given, aggregator)
                optimizer.load_state_dict(saved)
            run(given, optimizer, step)
            for number, parameter in enumerate(given):
                for rank in range(hvd.size()):
                    wanted = gradient_of(rank, step, number).numpy() + lost.get((rank, number), 0)
                    sent, lost[rank, number] = sign(wanted)
                    expected[number] -= sent / hvd.size()
                np.testing.assert_allclose(parameter.detach().numpy(), expected[number], rtol=0, atol=1e-12)

    ranks(check)


def test_gradients_on_some_ranks_only(ranks: Any) -> None:
    """A parameter has a gradient on one rank, another one nowhere, which stays as it is."""

    def check() -> None:
        aggregator, given = Mean(), parameters()
        optimizer = sgd(given, aggregator)
        run(given, optimizer, 0, (0, 1) if hvd.rank() == 0 else (0,))
        total = sum(gradient_of(rank, 0, 0) for rank in range(hvd.size()))
        torch.testing.assert_close(given[0].detach(), -total / hvd.size())
        torch.testing.assert_close(given[1].detach(), -gradient_of(0, 0, 1) / hvd.size())
        assert given[2].grad is None
        assert len(aggregator.weights) == 1

    ranks(check)


def test_a_rank_that_has_joined(ranks: Any) -> None:
    def check() -> None:
        aggregator, given = Mean(), parameters()
        optimizer = sgd(given, aggregator)
        steps = 2 if hvd.rank() == 0 else 4
        for step in range(steps):
            run(given, optimizer, step)
        hvd.join()
        longest = 2 if hvd.size() == 1 else 4
        expected = torch.zeros(SHAPES[0], dtype=torch.float64)
        for step in range(longest):
            there = [rank for rank in range(hvd.size()) if step < 2 or rank > 0]
            expected -= sum(gradient_of(rank, step, 0) for rank in there) / len(there)
        torch.testing.assert_close(given[0].detach(), expected)
        assert [weights.own for weights in aggregator.weights[:4]] == [float(n < steps) for n in range(longest)]

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_a_join_leaves_each_rank_its_own_errors(ranks: Any) -> None:
    """A rank that has joined takes part with its own aggregator, so it needs no other rank's errors."""

    def check() -> None:
        aggregator, given = Sign(), parameters()
        optimizer = sgd(given, aggregator)
        lost: list[Any] = [np.zeros(shape) for shape in SHAPES]
        steps = 2 if hvd.rank() == 0 else 4
        for step in range(4):
            for number in range(len(SHAPES)):
                own = gradient_of(hvd.rank(), step, number).numpy() if step < steps else 0.0
                lost[number] = sign(own + lost[number])[1]
            if step < steps:
                run(given, optimizer, step)
        hvd.join()
        for number, expected in enumerate(lost):
            np.testing.assert_allclose(aggregator.lost[number], expected, rtol=0, atol=1e-12)

    ranks(check)


def test_sparse_gradients_are_put_aside_before(ranks: Any) -> None:
    """The exchange is put off when the first sparse gradient is met: the aggregator does not see that."""

    def check() -> None:
        aggregator, table = Mean(), torch.nn.Embedding(5, 2, sparse=True)
        given = parameters()
        torch.nn.init.zeros_(table.weight)
        optimizer = sgd([*given, table.weight], aggregator)
        optimizer.zero_grad()
        (given[0].sum() + table(torch.tensor([hvd.rank()])).sum()).backward()
        optimizer.step()
        assert len(aggregator.weights) == 1
        rows = torch.zeros(5, 2)
        rows[: hvd.size()] = -1 / hvd.size()
        torch.testing.assert_close(table.weight.detach(), rows)

    ranks(check)


def test_broadcast_of_its_state(ranks: Any) -> None:
    def check() -> None:
        aggregator, given = Sign(), parameters()
        optimizer = sgd(given, aggregator)
        run(given, optimizer, 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        for number, lost in aggregator.lost.items():
            np.testing.assert_allclose(lost, sign(gradient_of(0, 0, number).numpy())[1], rtol=0, atol=1e-15)

    ranks(check)


@pytest.mark.parametrize(
    "options",
    [{"op": hvd.Sum}, {"op": hvd.Adasum}, {"shard": True}, {"overlap": True}, {"compression": hvd.Compression.fp16}],
    ids=lambda options: next(iter(options)),
)
def test_what_does_not_go_with_it(ranks: Any, options: dict[str, Any]) -> None:
    def check() -> None:
        with pytest.raises(ArgumentError, match=rf"{next(iter(options))}=.* and aggregator=Mean do not go together"):
            sgd(parameters(), Mean(), **options)

    ranks(check)


def test_other_bad_input(ranks: Any) -> None:
    def check() -> None:
        for wrong in (Mean, "powersgd", object()):
            with pytest.raises(ArgumentError, match="expected an object with a method aggregate"):
                sgd(parameters(), wrong)
        if hvd.size() > 1:
            with pytest.raises(MismatchError, match="aggregator='Mean'"):
                sgd(parameters(), Mean() if hvd.rank() == 0 else Sign())

    ranks(check)
