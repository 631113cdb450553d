"""Aggregators that send few bytes: nothing is lost for good, all ranks agree, and what has a low rank is exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.adapter.options import ExchangeOptions
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.local import LocalFabric, LocalTransport
from hvdlite.comm.point_to_point import PointToPointCollectives
from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.gradients.aggregator import Aggregator, FlatBucket, Weights
from hvdlite.gradients.lossy.names import LOSSY, Compression
from hvdlite.gradients.same_number import are_equal, with_square

Gradients = list[np.ndarray]
SHAPES = ((24, 3, 5), (7,), (16, 20), (2, 3))


def bucket_of(gradients: Sequence[np.ndarray]) -> FlatBucket:
    flat = np.concatenate([gradient.reshape(-1) for gradient in gradients])
    ends = np.cumsum([gradient.size for gradient in gradients])
    parts = np.split(flat, ends[:-1])  # views
    return FlatBucket(
        [flat], {i: part.reshape(g.shape) for i, (part, g) in enumerate(zip(parts, gradients, strict=True))}
    )


def gradients_of(rank: int, step: int, dtype: Any = np.float64) -> Gradients:
    chance = np.random.default_rng([7, rank, step])
    return [chance.standard_normal(shape).astype(dtype) for shape in SHAPES]


def apart(transport: LocalTransport) -> HierarchicalCollectives:
    """The operations of ranks each of which is a host of its own."""
    return HierarchicalCollectives(transport, range(transport.size), PointToPointCollectives)


def run(
    samples: Sequence[float],
    make: Callable[[], Aggregator],
    steps: int,
    given_by: Callable[[int, int], Gradients] = gradients_of,
) -> tuple[list[list[Gradients]], list[Any]]:
    """Return what each rank gets in each step, and each rank's aggregator."""
    aggregators = [make() for _ in samples]

    def rank(transport: LocalTransport) -> list[Gradients]:
        collectives, found = apart(transport), []
        for step in range(steps):
            bucket = bucket_of(given_by(transport.rank, step))
            weights = Weights(samples[transport.rank], sum(samples))
            aggregators[transport.rank].aggregate(bucket, weights, collectives)
            found.append([bucket.tensors[i].copy() for i in range(len(bucket.tensors))])
        return found

    return LocalFabric(len(samples)).run(rank), aggregators


def mean(samples: Sequence[float], step: int, given_by: Callable[[int, int], Gradients] = gradients_of) -> Gradients:
    shares = [weight / sum(samples) for weight in samples]
    everybody = [given_by(rank, step) for rank in range(len(samples))]
    return [sum(s * g for s, g in zip(shares, each, strict=True)) for each in zip(*everybody, strict=True)]


MAKES: dict[str, Callable[[], Aggregator]] = {
    "powersgd(1)": lambda: Compression.powersgd(1),
    "powersgd(3)": lambda: Compression.powersgd(3, least_gain=1.0),
    "powersgd(2, bits=16)": lambda: Compression.powersgd(2, bits=16),
    "powersgd after 2 steps": lambda: Compression.powersgd(1, exact_steps=2),
    "topk(0.05)": lambda: Compression.topk(0.05, smallest=10),
    "topk(0.5)": lambda: Compression.topk(0.5, smallest=0),
    "topk after 2 steps": lambda: Compression.topk(0.02, exact_steps=2, smallest=100),
}


@settings(max_examples=15)
@given(st.sampled_from(sorted(MAKES)), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 6))
def test_nothing_is_lost(name: str, samples: list[int], steps: int) -> None:
    """All that was applied, and what the ranks have left, is the sum of all gradients."""
    found, aggregators = run(samples, MAKES[name], steps)
    left = [each.state_dict()["errors"] for each in aggregators]
    for i, shape in enumerate(SHAPES):
        applied = sum(found[0][step][i] for step in range(steps))
        rest = sum(
            w / sum(samples) * np.reshape(e.get(i, np.zeros(shape)), shape) for w, e in zip(samples, left, strict=True)
        )
        truth = sum(mean(samples, step)[i] for step in range(steps))
        np.testing.assert_allclose(applied + rest, truth, atol=1e-12)
    for theirs in found[1:]:
        for step in range(steps):
            for mine, other in zip(found[0][step], theirs[step], strict=True):
                assert mine.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_mean_of_low_rank_is_exact(dtype: Any) -> None:
    left = np.random.default_rng(3).standard_normal((40, 2))

    def low(rank: int, step: int) -> Gradients:
        right = np.random.default_rng([rank, step]).standard_normal((2, 30))
        return [(left @ right).astype(dtype), np.full(5, rank, dtype)]

    found, _ = run([1, 2, 3], lambda: Compression.powersgd(2), 4, low)
    for step in range(4):
        for mine, truth in zip(found[2][step], mean([1, 2, 3], step, low), strict=True):
            np.testing.assert_allclose(mine, truth, atol=1e-12 if dtype is np.float64 else 5e-4)


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=40), st.booleans())
def test_sums_show_whether_numbers_are_equal(numbers: list[int], all_equal: bool) -> None:
    numbers = numbers[:1] * len(numbers) if all_equal else numbers
    total = np.sum([with_square(number) for number in numbers], axis=0, dtype=np.float64)
    assert are_equal(len(numbers), *total.tolist()) == (len(set(numbers)) == 1)


def test_the_iteration_goes_on() -> None:
    """Of a gradient that stays the same, the result comes closer to the largest singular vectors from step to step."""
    chance = np.random.default_rng(1)
    u, _, v = np.linalg.svd(chance.standard_normal((60, 40)), full_matrices=False)
    matrix = (u * 0.8 ** np.arange(40)) @ v
    best = (u[:, :2] * 0.8 ** np.arange(2)) @ v[:2]

    class Forgets(LOSSY[0]):  # type: ignore[misc, valid-type]
        """Without the error memory, which would change the matrix."""

        def aggregate(self, *given: Any) -> None:
            super().aggregate(*given)
            self._errors.load({})

    found, _ = run([1, 1], lambda: Forgets(2), 40, lambda rank, step: [matrix.copy()])
    away = [np.linalg.norm(step[0] - best) for step in found[0]]
    assert away[0] > 0.1
    assert away[-1] < 1e-3


def test_topk_sends_the_largest() -> None:
    found, _ = run([1, 1, 2], lambda: Compression.topk(0.1, smallest=8), 1)
    truth = [np.zeros(shape) for shape in SHAPES]
    for rank, share in enumerate([0.25, 0.25, 0.5]):
        for whole, gradient in zip(truth, gradients_of(rank, 0), strict=True):
            count = max(1, round(0.1 * gradient.size)) if gradient.size >= 8 else gradient.size
            limit = np.sort(np.abs(gradient).reshape(-1))[-count]
            whole += share * np.where(np.abs(gradient) >= limit, gradient, 0)
    for mine, expected in zip(found[1][0], truth, strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-15)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", MAKES)
def test_an_overflow_leaves_the_memory_as_it_is(name: str, place: int) -> None:
    """All ranks see that the step cannot be used. The steps after it are as if it had not been."""

    def with_overflow(rank: int, step: int) -> Gradients:
        gradients = gradients_of(rank, step if step < 3 else step - 1)
        if step == 3 and rank == 1:
            gradients[place].flat[5] = np.inf
        return gradients

    found, aggregators = run([1, 2], MAKES[name], 6, with_overflow)
    expected, truth = run([1, 2], MAKES[name], 5)
    for mine in found:
        assert not all(np.isfinite(gradient).all() for gradient in mine[3])
        for step in (0, 1, 2, 4, 5):
            for gradient, other in zip(mine[step], expected[0][step if step < 3 else step - 1], strict=True):
                assert gradient.tobytes() == other.tobytes()
    for one, other in zip(aggregators, truth, strict=True):
        left = other.state_dict()["errors"]
        for number, error in one.state_dict()["errors"].items():
            np.testing.assert_array_equal(error, left[number])


@pytest.mark.parametrize("name", MAKES)
def test_a_rank_without_data_keeps_what_it_has(name: str) -> None:
    """The others' results are those without it. Its errors wait for its next batch."""
    empty = lambda rank, step: [0 * g for g in gradients_of(rank, step)] if rank == 2 else gradients_of(rank, step)  # noqa: E731
    found, aggregators = run([1, 2, 0], MAKES[name], 4, empty)
    alone, _ = run([1, 2], MAKES[name], 4)
    for step in range(4):
        for mine, truth in zip(found[2][step], alone[0][step], strict=True):
            np.testing.assert_allclose(mine, truth, atol=1e-12)
    assert aggregators[2].state_dict()["errors"] == {}


def test_ranks_that_go_on_from_different_states() -> None:
    def check(transport: LocalTransport) -> None:
        aggregator, collectives = Compression.powersgd(2), apart(transport)
        aggregator.aggregate(bucket_of(gradients_of(transport.rank, 0)), Weights(1, 3), collectives)
        if transport.rank == 1:
            state = aggregator.state_dict()
            aggregator.load_state_dict(state | {"columns": {i: 2 * q for i, q in state["columns"].items()}})
        with pytest.raises(MismatchError, match=r"different states.*broadcast_optimizer_state"):
            aggregator.aggregate(bucket_of(gradients_of(transport.rank, 1)), Weights(1, 3), collectives)

    LocalFabric(3).run(check)


@pytest.mark.parametrize(
    "make", [lambda: Compression.powersgd(2, exact_steps=3), lambda: Compression.topk(exact_steps=3)]
)
def test_ranks_that_go_on_after_different_numbers_of_steps(make: Callable[[], Any]) -> None:
    """One rank would send whole gradients, and the others not: they must not begin."""

    def check(transport: LocalTransport) -> None:
        aggregator, collectives = make(), apart(transport)
        if transport.rank == 1:
            aggregator.load_state_dict(aggregator.state_dict() | {"step": 3})
        with pytest.raises(MismatchError, match=r"different states.*load_state_dict"):
            aggregator.aggregate(bucket_of(gradients_of(transport.rank, 0)), Weights(1, 3), collectives)

    LocalFabric(3).run(check)


@pytest.mark.parametrize("name", MAKES)
def test_a_state_is_a_copy_that_continues(name: str) -> None:
    whole, _ = run([1, 1], MAKES[name], 6)
    _, aggregators = run([1, 1], MAKES[name], 3)
    states = [each.state_dict() for each in aggregators]
    fresh = iter([MAKES[name](), MAKES[name]()])
    late = lambda rank, step: gradients_of(rank, step + 3)  # noqa: E731
    made: list[Any] = []

    def again() -> Any:
        made.append(next(fresh))
        made[-1].load_state_dict(states[len(made) - 1])
        return made[-1]

    found, _ = run([1, 1], again, 3, late)
    for step in range(3):
        for mine, truth in zip(found[0][step], whole[0][step + 3], strict=True):
            assert mine.tobytes() == truth.tobytes()


def test_parameters_get_new_numbers() -> None:
    for make in (Compression.powersgd(1), Compression.topk(0.05, smallest=10)):
        _, (aggregator,) = run([1], lambda make=make: make, 2)
        before = aggregator.state_dict()
        aggregator.renumber({2: 0, 0: 5})
        after = aggregator.state_dict()
        assert set(after["errors"]) == {0, 5}
        np.testing.assert_array_equal(after["errors"][0], before["errors"][2])
        if "columns" in before:
            np.testing.assert_array_equal(after["columns"][5], before["columns"][0])


def test_few_bytes_travel() -> None:
    def traffic(make: Callable[[], Aggregator]) -> float:
        fabric = LocalFabric(4)

        def rank(transport: LocalTransport) -> None:
            bucket = bucket_of([np.ones((512, 512), np.float32), np.ones(512, np.float32)])
            make().aggregate(bucket, Weights(1, 4), apart(transport))

        fabric.run(rank)
        return sum(fabric.traffic(rank).bytes for rank in range(4))

    plain = traffic(lambda: Compression.powersgd(1, exact_steps=1))
    assert plain > 4 * 1.4 * 4 * 512 * 512
    assert plain / traffic(lambda: Compression.powersgd(4)) > 40
    assert traffic(lambda: Compression.powersgd(16)) / traffic(lambda: Compression.powersgd(16, bits=16)) > 1.9
    assert plain / traffic(lambda: Compression.topk(0.01)) > 15


def test_options_take_single_gradients_and_whole_steps_apart() -> None:
    with pytest.raises(ArgumentError, match="compression=7: expected hvd.Compression.none, fp16 or bf16"):
        ExchangeOptions(compression=7)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"compression=topk\(0.1.*: expected hvd.Compression.none"):
        ExchangeOptions(compression=Compression.topk(0.1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Compression.powersgd(0), r"powersgd: rank=0: expected a number of columns from 1 on"),
        (lambda: Compression.powersgd(2.5), r"powersgd: rank=2.5"),
        (lambda: Compression.powersgd(exact_steps=-1), "expected exact_steps from 0 on"),
        (lambda: Compression.powersgd(least_gain=0.5), "least_gain from 1 on"),
        (lambda: Compression.topk(0), r"topk\(ratio=0\): expected a part of the elements"),
        (lambda: Compression.topk(1.5), r"topk\(ratio=1.5\)"),
        (lambda: Compression.topk(smallest=-1), "expected numbers from 0 on"),
    ],
)
def test_wrong_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
