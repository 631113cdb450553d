"""join: ranks that run out of data at different times, and what the others' operations give meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.errors import DuplicateNameError, HvdliteError, MismatchError

UFUNCS: dict[hvd.ReduceOp, np.ufunc] = {
    hvd.Sum: np.add,
    hvd.Average: np.add,
    hvd.Min: np.minimum,
    hvd.Max: np.maximum,
    hvd.Product: np.multiply,
}
NUMBERS = ("float64", "float32", "float16", "bfloat16", "int32", "uint8", "int64")
DTYPES = {
    hvd.Sum: (*NUMBERS, "complex64"),
    hvd.Average: ("float64", "float32", "bfloat16", "int32"),
    hvd.Min: (*NUMBERS, "bool"),
    hvd.Max: (*NUMBERS, "bool"),
    hvd.Product: (*NUMBERS, "complex64"),
}


@dataclass
class Step:
    """One operation of a program: how a rank starts it, and what NumPy says that it gives."""

    start: Callable[[int, str | None], hvd.Handle]
    """Of the rank."""
    truth: Callable[[int, list[int]], Any]
    """Of the rank and the ranks that have not joined; an exception if it has to fail."""
    named: bool


def cast(values: Any, dtype: str) -> Any:
    return np.asarray(values).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def draw_reduction(draw: random.Random, size: int, scatter: bool) -> Step:
    op = draw.choice(list(UFUNCS))
    count = draw.choice([None, None, 1, 3])
    dtypes = [draw.choice(DTYPES[op]) for _ in range(count or 1)]
    shapes = [draw.choice([(5,), (2, 3), (0, 2), (700,)] + [()] * (not scatter)) for _ in dtypes]
    scales = draw.choice([(1.0, 1.0), (-2.0, 0.5), (0.5, 4.0)])
    if any(dtype not in ("float64", "float32", "float16", "bfloat16") for dtype in dtypes):
        scales = (1.0, 1.0)
    seed = draw.random()

    def values(rank: int, index: int) -> Any:
        # Even and small, so that all results are exact in all dtypes, but for averages.
        generator = np.random.default_rng([int(seed * 2**32), rank, index])
        return cast(2 * generator.integers(0, 2, shapes[index]) + 2, dtypes[index])

    def start(rank: int, name: str | None) -> hvd.Handle:
        given = [values(rank, index) for index in range(len(dtypes))]
        function = hvd.reducescatter_async if scatter else hvd.allreduce_async
        tensors = given[0] if count is None else given
        return function(tensors, op, name, prescale_factor=scales[0], postscale_factor=scales[1])

    def truth(rank: int, active: list[int]) -> Any:
        results = []
        for index, dtype in enumerate(dtypes):
            wide = "bool" if dtype == "bool" else "complex128" if dtype.startswith("complex") else "float64"
            parts = [values(each, index).astype(wide) for each in active]
            result = UFUNCS[op].reduce([part if wide == "bool" else part * scales[0] for part in parts])
            if op is hvd.Average:
                result = result / size
                result = np.trunc(result) if dtype == "int32" else result
            result = result if wide == "bool" else result * scales[1]
            if scatter:
                result = np.array_split(result, size)[rank]
            results.append(cast(result, dtype))
        return results[0] if count is None else results

    return Step(start, truth, draw.random() < 0.7)


def draw_gather(draw: random.Random, size: int) -> Step:
    dtype, scalars = draw.choice([*NUMBERS, "bool"]), draw.random() < 0.2

    def values(rank: int) -> Any:
        return cast(rank + 1, dtype) if scalars else cast(np.full((rank + 1, 2), rank + 1), dtype)

    def truth(rank: int, active: list[int]) -> Any:
        return np.concatenate([np.atleast_1d(values(each)) for each in active])

    return Step(lambda rank, name: hvd.allgather_async(values(rank), name), truth, draw.random() < 0.7)


def draw_alltoall(draw: random.Random, size: int) -> Step:
    dtype, even = draw.choice(NUMBERS), draw.random() < 0.5

    def splits(rank: int) -> list[int]:
        return [2] * size if even else [(rank + dest) % 3 for dest in range(size)]

    def start(rank: int, name: str | None) -> hvd.Handle:
        rows = np.concatenate([np.full(n, 10 * rank + dest) for dest, n in enumerate(splits(rank))])
        return hvd.alltoall_async(cast(rows, dtype), None if even else splits(rank), name)

    def truth(rank: int, active: list[int]) -> Any:
        counts = [splits(each)[rank] if each in active else 0 for each in range(size)]
        rows = cast(np.repeat(10 * np.arange(size) + rank, counts), dtype)
        return rows if even else (rows, np.array(counts, np.int32))

    return Step(start, truth, draw.random() < 0.7)


def draw_broadcast(draw: random.Random, size: int) -> Step:
    root, dtype, of_object = draw.randrange(size), draw.choice([*NUMBERS, "bool"]), draw.random() < 0.5

    def start(rank: int, name: str | None) -> hvd.Handle:
        if of_object:
            return hvd.broadcast_object_async({"from": rank}, root, name)
        return hvd.broadcast_async(cast(np.full((2, 3), rank), dtype), root, name)

    def truth(rank: int, active: list[int]) -> Any:
        if root not in active:
            return MismatchError(f"rank {root} is its root")
        return {"from": root} if of_object else cast(np.full((2, 3), root), dtype)

    return Step(start, truth, draw.random() < 0.7)


def draw_gather_of_objects(draw: random.Random, size: int) -> Step:
    def truth(rank: int, active: list[int]) -> Any:
        return [f"object of {each}" if each in active else None for each in range(size)]

    return Step(lambda rank, name: hvd.allgather_object_async(f"object of {rank}", name), truth, draw.random() < 0.7)


def draw_step(draw: random.Random, size: int) -> Step:
    return draw.choice(
        [
            *[lambda: draw_reduction(draw, size, scatter=False)] * 3,
            lambda: draw_reduction(draw, size, scatter=True),
            lambda: draw_gather(draw, size),
            lambda: draw_alltoall(draw, size),
            lambda: draw_broadcast(draw, size),
            lambda: draw_gather_of_objects(draw, size),
            lambda: Step(lambda rank, name: hvd.barrier_async(name), lambda rank, active: None, True),
        ]
    )()


def assert_same(result: Any, expected: Any) -> None:
    if isinstance(expected, list | tuple):
        assert type(result) is type(expected) and len(result) == len(expected)
        for each, other in zip(result, expected, strict=True):
            assert_same(each, other)
    elif isinstance(expected, np.ndarray | np.generic):
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        tolerance = 1e-6 if expected.dtype in (np.float32, np.float64) else 0.02  # averages of three are not exact
        np.testing.assert_allclose(
            *(x.astype(complex if x.dtype.kind == "c" else float) for x in (result, expected)), rtol=tolerance
        )
    else:
        assert result == expected


def run_program(steps: list[Step], stops: list[int], waits_before: bool, own: random.Random) -> int:
    """This rank's first steps, checked; then join.

    Args:
        steps: Of all ranks.
        stops: For each rank, how many steps it takes.
        waits_before: Wait for all handles before join; else for the last ones after.
        own: Draws this rank's order.

    Returns:
        What join returned.
    """
    rank = hvd.rank()
    handles: dict[int, hvd.Handle] = {}

    def check_all() -> None:
        for number in sorted(handles):
            handle, truth = (
                handles.pop(number),
                steps[number].truth(rank, [r for r, n in enumerate(stops) if n > number]),
            )
            if isinstance(truth, MismatchError):
                with pytest.raises(MismatchError, match=str(truth)):
                    handle.wait()
            else:
                assert_same(handle.wait(), truth)

    here = 0
    while here < stops[rank]:
        window = list(range(here, min(here + own.randrange(1, 8), stops[rank])))
        here = window[-1] + 1
        unnamed = [number for number in window if not steps[number].named]
        own.shuffle(window)
        for drawn in window:  # the unnamed ones in their order, the others in any
            number = drawn if steps[drawn].named else unnamed.pop(0)
            handles[number] = steps[number].start(rank, f"step {number}" if steps[number].named else None)
        if here < stops[rank] or waits_before:
            check_all()
    last = hvd.join()
    check_all()
    return last


@pytest.mark.parametrize("seed", range(25))
def test_ranks_that_stop_after_different_numbers_of_operations(ranks: Any, seed: int) -> None:
    def check() -> list[int]:
        size = hvd.size()
        common, own = random.Random(seed), random.Random(100 * seed + hvd.rank())
        steps = [draw_step(common, size) for _ in range(common.randrange(1, 25))]
        lasts = []
        for _ in range(3):  # epochs: the same signatures again, so letters with ids
            stops = [common.randrange(len(steps) + 1) for _ in range(size)]
            waits_before = common.random() < 0.6
            last = run_program(steps, stops, waits_before, own)
            assert 0 <= last < size
            if waits_before and stops.count(max(stops)) == 1:
                assert last == stops.index(max(stops))
            x = hvd.allreduce(np.array([float(hvd.rank())]), hvd.Sum)  # the unnamed ones meet again
            assert x.tolist() == [sum(range(size))]
            lasts.append(last)
        return lasts

    outcomes = ranks(check)
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_all_join_at_once_and_again(ranks: Any) -> None:
    def check() -> list[int]:
        return [hvd.join() for _ in range(20)]

    outcomes = ranks(check)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert set(outcomes[0]) <= set(range(len(outcomes)))


def first_joins_alone(body: Callable[[], None]) -> None:
    """Rank 0 joins; the others do `body`, and join."""
    if hvd.rank():
        body()
    assert hvd.join() != 0 or hvd.size() == 1


def test_operations_fused_with_those_that_the_joined_rank_had_started(ranks: Any) -> None:
    """One exchange holds tensors that the joined rank has, and such that it has not; prescaled, so 0 would not be neutral."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        if rank == 0:
            own = hvd.allreduce_async(np.full(3, 5.0), hvd.Min, "c", prescale_factor=-1.0)
            assert hvd.join() != 0 or size == 1
            assert own.wait().tolist() == [-5.0 - max(0, size - 1)] * 3
            return
        handles = {
            name: hvd.allreduce_async(np.full(3, 5.0 + rank), hvd.Min, name, prescale_factor=-1.0) for name in "abcdef"
        }
        for handle in handles.values():
            assert handle.wait().tolist() == [-5.0 - (size - 1)] * 3
        hvd.join()

    ranks(check)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_adasum_leaves_out_who_has_joined(ranks: Any, dtype: str) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()

        def body() -> None:
            orthogonal = hvd.allreduce(cast(3 * np.eye(size)[rank], dtype), hvd.Adasum)  # they add up
            assert_same(orthogonal, cast(3 * (np.arange(size) > 0), dtype))
            parallel = hvd.allreduce([cast(np.full(4, 2.0), dtype), cast(np.zeros(2), dtype)], hvd.Adasum)  # their mean
            assert_same(parallel, [cast(np.full(4, 2.0), dtype), cast(np.zeros(2), dtype)])

        first_joins_alone(body)

    ranks(check)


def test_what_needs_every_rank_fails_on_the_others(ranks: Any) -> None:
    def check() -> None:
        def body() -> None:
            for call in (lambda: hvd.add_process_set([0]), lambda: hvd.remove_process_set(added)):
                with pytest.raises(
                    MismatchError, match="rank 0 has joined and it needs every rank: do it before any rank"
                ):
                    call()
            with pytest.raises(
                MismatchError, match=r"'state' broadcast\(float64\(1\), root_rank=0\) cannot .* rank 0 has"
            ):
                hvd.broadcast(np.ones(1), 0, "state")
            with pytest.raises(MismatchError, match="rank 0 has joined"):
                hvd.broadcast_object(1)
            assert hvd.broadcast(np.array([hvd.rank()]), 1).tolist() == [1]

        if hvd.size() == 1:
            return
        added = hvd.add_process_set([hvd.size() - 1])
        first_joins_alone(body)
        assert hvd.remove_process_set(added)  # its ranks are whole again, and so is the world

    ranks(check)


def test_the_others_mismatches_are_told_as_ever(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()

        def body() -> None:
            with pytest.raises(MismatchError) as caught:
                hvd.allreduce(np.ones(rank), hvd.Sum)
            assert [f"rank {r}: allreduce(float64({r})" in str(caught.value) for r in range(3)] == [False, True, True]
            with pytest.raises(MismatchError, match=r"rank 0 waits for join\(\)\n  rank 1 waits for 'of 1'"):
                hvd.allreduce(np.ones(1), hvd.Sum, f"of {rank}")
            assert hvd.allreduce(np.ones(1), hvd.Sum, f"of {1}") == size - 1

        if size == 3:
            first_joins_alone(body)

    ranks(check)


def test_a_rank_that_has_joined_submits_nothing(ranks: Any) -> None:
    def check() -> None:
        here, errors = hvd.api.world(), []

        def work() -> None:
            with hvd.api.in_world(here):
                while not here.engine().has_joined:
                    pass
                for call in (hvd.join, hvd.barrier, lambda: hvd.allreduce_async(np.ones(1), name="x")):
                    try:
                        call()
                    except HvdliteError as error:
                        errors.append(str(error))
                hvd.barrier_async("go on", process_set=others)

        if hvd.size() < 3:
            return
        others = hvd.add_process_set([0, 1])
        if hvd.rank() == 0:
            thread = threading.Thread(target=work)
            thread.start()
            hvd.join()
            thread.join()
            assert all("this rank has called join(), so until all ranks have" in error for error in errors)
            assert [error.split("cannot call ")[1].split(":")[0] for error in errors] == [
                "join()",
                "barrier()",
                "allreduce(float64(1), op=average)",
            ]
        else:
            if others.included():
                hvd.barrier("go on", process_set=others)  # when rank 0 has joined, and tried
            hvd.join()
        assert not here.engine().has_joined
        hvd.barrier()
        hvd.remove_process_set(others)

    ranks(check)


@pytest.mark.ranks(at_least=3)
def test_sets_are_joined_by_themselves(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        upper = hvd.add_process_set(range(1, size))
        if 0 < rank < size - 1:
            for _ in range(3):
                assert hvd.allreduce(np.array([2.0]), hvd.Average, process_set=upper) == 2 * (size - 2) / (size - 1)
            assert hvd.allgather(np.array([rank]), process_set=upper).tolist() == list(range(1, size - 1))
        if upper.included():
            assert hvd.join(upper) in range(size - 2)  # numbers within the set; not the last one, which took no part
        assert hvd.allreduce(np.ones(1), hvd.Sum) == size  # the whole world was not joined
        hvd.barrier()
        hvd.remove_process_set(upper)

    ranks(check)


def test_names_in_flight_stay_in_flight(ranks: Any) -> None:
    """A handle that was not waited for before join still holds its name after."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        handle = hvd.allreduce_async(np.ones(1), hvd.Sum, "kept")
        if rank:
            assert handle.wait() == size
            assert hvd.allreduce(np.ones(1), hvd.Sum, "kept") == (size - 1 if size > 1 else 1)  # rank 0 has joined
        hvd.join()
        if rank == 0:
            with pytest.raises(DuplicateNameError):
                hvd.allreduce_async(np.ones(1), hvd.Sum, "kept")
            assert handle.wait() == size
        assert hvd.allreduce(np.ones(1), hvd.Sum, "kept") == size

    ranks(check)


def test_training_on_uneven_data_equals_the_joined_batches(ranks: Any) -> None:
    """Least squares by gradients summed over the ranks, with the number of samples summed beside them."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        generator = np.random.default_rng(0)
        lengths = [3 + 2 * r for r in range(size)]
        data = [(generator.normal(size=(n, 4, 3)), generator.normal(size=(n, 4))) for n in lengths]

        def gradient(batch: list[tuple[Any, Any]], weights: Any) -> tuple[Any, int]:
            return sum(x.T @ (x @ weights - y) for x, y in batch), sum(len(y) for _, y in batch)

        alone = np.zeros(3)
        for step in range(max(lengths)):
            g, n = gradient([(x[step], y[step]) for x, y in data if step < len(y)], alone)
            alone -= 0.1 * g / n

        weights, (x, y) = np.zeros(3), data[rank]
        for step in range(lengths[rank]):
            g, n = gradient([(x[step], y[step])], weights)
            g = hvd.allreduce(g, hvd.Sum, "gradient")
            weights = weights - 0.1 * g / hvd.allreduce(np.array(n), hvd.Sum, "samples")
        last = hvd.join()
        assert last == size - 1
        np.testing.assert_allclose(hvd.broadcast(weights, last), alone, rtol=1e-12)

    ranks(check)
