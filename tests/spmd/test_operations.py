"""Every operation, on every kind of tensor, against NumPy. (TensorFlow's are in test_tf_tensors.py.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import array_api_strict
import ml_dtypes
import numpy as np
import pytest
import torch

import hvdlite as hvd
from hvdlite.comm.mpi.start import start_mpi
from hvdlite.errors import ArgumentError, UnsupportedTensorError

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
NUMBERS = (*INTEGERS, *FLOATS, "complex64", "complex128")

Make = Callable[[Any, str], Any]


def numpy_make(values: Any, dtype: str) -> Any:
    return np.array(values).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def torch_make(values: Any, dtype: str) -> Any:
    return torch.tensor(np.asarray(values)).to(getattr(torch, dtype))


def strict_make(values: Any, dtype: str) -> Any:
    return array_api_strict.asarray(np.array(values).astype(dtype))


MAKERS: dict[str, Make] = {"numpy": numpy_make, "torch": torch_make, "dlpack": strict_make}
CASES = [
    pytest.param(make, dtype, id=f"{kind}-{dtype}")
    for kind, make in MAKERS.items()
    for dtype in NUMBERS
    if (kind, dtype) not in {("dlpack", "float16"), ("dlpack", "bfloat16")}  # not in the array API
]


def values_of(tensor: Any) -> Any:
    """Any tensor as a NumPy array of a dtype that NumPy can calculate with."""
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.float().numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
    elif hasattr(tensor, "numpy"):  # TensorFlow's, as an array that may be changed
        tensor = tensor.numpy()
    array = np.asarray(tensor)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def assert_same(result: Any, like: Any, expected: Any) -> None:
    """Of the same kind and dtype as `like`, with the expected values and shape."""
    assert type(result) is type(like)
    assert result.dtype == like.dtype
    np.testing.assert_array_equal(values_of(result), np.asarray(expected))


def check_all_operations(make: Make, dtype: str) -> None:
    rank, size = hvd.rank(), hvd.size()
    base = np.arange(6).reshape(2, 3) % 3
    each = [base + r for r in range(size)]
    x = make(each[rank], dtype)
    assert_same(hvd.allreduce(x, hvd.Sum), x, sum(each))
    assert_same(hvd.allreduce(x, hvd.Product), x, np.prod(each, axis=0))
    if "complex" not in dtype:
        assert_same(hvd.allreduce(x, hvd.Min), x, base)
        assert_same(hvd.allreduce(x, hvd.Max), x, base + size - 1)
    assert_same(hvd.broadcast(x, size - 1), x, base + size - 1)
    assert_same(hvd.allgather(x), x, np.concatenate(each))
    scalar = make(rank + 1, dtype)
    assert_same(hvd.allgather(scalar), scalar, np.arange(size) + 1)
    assert_same(hvd.allreduce(scalar, hvd.Sum), scalar, size * (size + 1) // 2)
    parts = make(np.arange(size) + 10 * rank, dtype)
    assert_same(hvd.alltoall(parts), parts, rank + 10 * np.arange(size))
    rows = make(np.arange(size + 1) * (rank + 1), dtype)
    own = range(0, 2) if rank == 0 else range(rank + 1, rank + 2)
    assert_same(hvd.reducescatter(rows, hvd.Sum), rows, np.array(own) * (size * (size + 1) // 2))


@pytest.mark.parametrize(("make", "dtype"), CASES)
def test_all_operations_keep_the_kind_and_dtype(ranks: Any, make: Make, dtype: str) -> None:
    ranks(check_all_operations, make, dtype)


def check_averages(make: Make, dtype: str) -> None:
    rank, size = hvd.rank(), hvd.size()
    even = make(np.array([2, 4]) * rank, dtype)  # the mean of 0 … size - 1, doubled, is whole
    assert_same(hvd.allreduce(even), even, np.array([1, 2]) * (size - 1))
    large = make([100] * size, dtype)  # their sum is too large for 8 bits; their mean is not
    assert_same(hvd.allreduce(large), large, [100] * size)
    assert_same(hvd.reducescatter(large), large, [100])


@pytest.mark.parametrize(("make", "dtype"), CASES)
def test_averages(ranks: Any, make: Make, dtype: str) -> None:
    ranks(check_averages, make, dtype)


def truncated(total: int, size: int) -> int:
    """The quotient of Python's integers, which have no end, rounded toward zero."""
    return abs(total) // size * (-1 if total < 0 else 1)


@pytest.mark.parametrize("count", [1, 20_000])  # by every way of a host, and between hosts
def test_averages_that_fit_though_their_sums_do_not(ranks: Any, count: int) -> None:
    """Integers are rounded toward zero."""
    most, least = 2**63 - 1, -(2**63)

    def all_ways(x: Any) -> Iterator[Any]:
        yield hvd.allreduce(x)
        yield hvd.allreduce([x, np.ones_like(x)])[0]
        yield hvd.allreduce_async(x).wait()
        yield hvd.allreduce(x.copy(), inplace=True)
        yield hvd.allreduce(x, algorithm="ring")
        yield hvd.allreduce(x, prescale_factor=1.0)
        yield hvd.allgather(hvd.reducescatter(x))

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        columns = [[7 if r == 0 else 0 for r in range(size)], [-7 if r == 0 else 0 for r in range(size)]]
        columns += [[value] * size for value in (most, least, 2**62 + 2**61)]
        columns += [
            [most - r for r in range(size)],
            [least + r for r in range(size)],
            [(-1) ** r * most for r in range(size)],
        ]
        x = np.array([column[rank] for column in columns] * count, np.int64)
        for got in all_ways(x):
            assert got.reshape(count, -1)[:: max(1, count - 1)].tolist() == [
                [truncated(sum(column), size) for column in columns]
            ] * min(count, 2)
        unsigned = np.array([2**64 - 2, 2**64 - 1 - rank] * count, np.uint64)
        for got in all_ways(unsigned):
            assert got[-2:].tolist() == [2**64 - 2, truncated(sum(2**64 - 1 - r for r in range(size)), size)]
        large = np.array([3e38, -3e38, 1e-40, 3e38 if rank else -3e38] * count, np.float32)
        for got in all_ways(large):
            np.testing.assert_allclose(got[-4:], [3e38, -3e38, 1e-40, 3e38 / size * (size - 2)], rtol=1e-4)

    ranks(check)


def check_halves(make: Make, dtype: str) -> None:
    rank, size = hvd.rank(), hvd.size()
    random = np.random.default_rng(rank)
    mine = values_of(make(random.normal(size=1000), dtype))
    # 1000 + many small ones: adding in half precision would lose them
    mine[0] = 1000.0 if rank == 0 else 0.3
    x = make(mine, dtype)
    everybody = np.stack(hvd.allgather_object(values_of(x).astype(np.float64)))
    exact = everybody.sum(axis=0)
    rounded_once = values_of(make(exact.astype(np.float32), dtype)).astype(np.float64)
    got = values_of(hvd.allreduce(x, hvd.Sum)).astype(np.float64)
    step = np.spacing(np.abs(exact).astype(np.float16)).astype(np.float64) * (8 if dtype == "bfloat16" else 1)
    assert (np.abs(got - rounded_once) <= 1e-6 * np.abs(exact) + 1e-6 + (size > 2) * step).all()
    assert (np.abs(got - exact) <= 0.51 * step + 1e-6 * np.abs(exact) + 1e-6).all()


@pytest.mark.parametrize("make", [numpy_make, torch_make])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_summed_with_float32_accuracy(ranks: Any, make: Make, dtype: str) -> None:
    ranks(check_halves, make, dtype)


def check_bool(make: Make) -> None:
    rank, size = hvd.rank(), hvd.size()
    x = make([True, False, rank == 0], "bool")
    assert_same(hvd.allreduce(x, hvd.Max), x, [True, False, True])
    assert_same(hvd.allreduce(x, hvd.Min), x, [True, False, size == 1])
    assert_same(hvd.allreduce(x, hvd.Product), x, [True, False, size == 1])
    assert_same(hvd.allgather(x), x, np.concatenate([[True, False, r == 0] for r in range(size)]))
    for op in (hvd.Sum, hvd.Average):
        with pytest.raises(UnsupportedTensorError, match="use Max for 'any'"):
            hvd.allreduce(x, op)


@pytest.mark.parametrize("make", [numpy_make, torch_make, strict_make])
def test_bool(ranks: Any, make: Make) -> None:
    ranks(check_bool, make)


def test_lists_are_one_exchange(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        xs = [
            np.full(3, rank, np.float32),
            np.full((2, 2), rank, np.int32),
            np.float32(rank),
            torch.tensor([rank * 1.0]),
        ]
        total = size * (size - 1) // 2
        for result, x in zip(hvd.allreduce(xs, hvd.Sum), xs, strict=True):
            assert_same(result, x, np.full(np.shape(x), total))
        for result, x in zip(hvd.broadcast(xs, size - 1), xs, strict=True):
            assert_same(result, x, np.full(np.shape(x), size - 1))
        gathered = hvd.allgather([np.full(rank, rank), np.array([rank])])
        assert gathered[0].tolist() == [r for r in range(size) for _ in range(r)]
        assert gathered[1].tolist() == list(range(size))
        scattered = hvd.reducescatter([np.ones(size), np.ones((size, 2))], hvd.Sum)
        assert [part.shape for part in scattered] == [(1,), (1, 2)]
        assert all((part == size).all() for part in scattered)
        spread = hvd.alltoall([np.arange(size), np.arange(2 * size)])
        assert spread[0].tolist() == [rank] * size
        assert spread[1].tolist() == [2 * rank, 2 * rank + 1] * size
        assert hvd.allreduce([]) == []

    ranks(check)


def test_in_place(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        for make, dtype in (
            (numpy_make, "float32"),
            (torch_make, "float32"),
            (torch_make, "bfloat16"),
            (numpy_make, "int8"),
        ):
            x = make([rank + 1.0, 2.0], dtype)
            assert hvd.allreduce(x, hvd.Sum, inplace=True) is x
            assert values_of(x).tolist() == [size * (size + 1) // 2, 2 * size]
            x = make([rank, rank], dtype)
            assert hvd.broadcast(x, size - 1, inplace=True) is x
            assert values_of(x).tolist() == [size - 1] * 2
        columns = np.zeros((4, 3))[:, 1:]  # not contiguous
        columns[:] = rank + 1
        hvd.allreduce(columns, hvd.Sum, inplace=True)
        assert (columns == size * (size + 1) // 2).all()
        transposed = torch.ones(4, 3).t()
        hvd.allreduce(transposed, hvd.Sum, inplace=True)
        assert (transposed == size).all()
        parameter = torch.nn.Parameter(torch.ones(2))
        hvd.broadcast(parameter, 0, inplace=True)

    ranks(check)


def check_inputs_stay(make: Make) -> None:
    for dtype in ("float32", "bfloat16", "int32"):
        x = make([1, 2], dtype)
        hvd.allreduce(x, hvd.Sum, prescale_factor=2)
        hvd.allreduce([x, x], hvd.Sum)
        hvd.broadcast(x, 0)
        hvd.reducescatter(make(np.ones(hvd.size()), dtype), hvd.Sum, prescale_factor=3)
        assert values_of(x).tolist() == [1, 2]


@pytest.mark.parametrize("make", [numpy_make, torch_make])
def test_results_do_not_change_the_inputs(ranks: Any, make: Make) -> None:
    ranks(check_inputs_stay, make)


def test_read_only_and_strided_inputs(ranks: Any) -> None:
    def check() -> None:
        size = hvd.size()
        x = np.arange(12.0).reshape(3, 4)
        x.flags.writeable = False
        for view in (x, x.T, x[::2], x[:, ::-1]):
            np.testing.assert_array_equal(hvd.allreduce(view, hvd.Sum), view * size)
            np.testing.assert_array_equal(hvd.allgather(view), np.concatenate([view] * size))
        with pytest.raises(UnsupportedTensorError, match="read-only"):
            hvd.allreduce(x, inplace=True)
        with pytest.raises(UnsupportedTensorError, match="expanded"):
            hvd.allreduce(torch.ones(1).expand(3), inplace=True)
        with pytest.raises(UnsupportedTensorError, match="NumPy scalar"):
            hvd.allreduce(np.float32(1), inplace=True)

    ranks(check)


def check_zero_length(make: Make) -> None:
    rank, size = hvd.rank(), hvd.size()
    empty = make(np.zeros((0, 3)), "float32")
    for result in (hvd.allreduce(empty), hvd.broadcast(empty, 0), hvd.allgather(empty), hvd.alltoall(empty)):
        assert_same(result, empty, np.zeros((0, 3)))
    assert_same(hvd.reducescatter(empty), empty, np.zeros((0, 3)))
    last_only = make(np.ones((int(rank == size - 1), 2)), "float32")
    assert_same(hvd.allgather(last_only), last_only, np.ones((1, 2)))
    few = make(np.ones((1, 2)), "float32")  # fewer rows than ranks
    assert_same(hvd.reducescatter(few, hvd.Sum), few, np.full((int(rank == 0), 2), size))


@pytest.mark.parametrize("make", [numpy_make, torch_make])
def test_zero_length(ranks: Any, make: Make) -> None:
    ranks(check_zero_length, make)


def test_scale_factors(ranks: Any) -> None:
    def check() -> None:
        size = hvd.size()
        x = np.array([1.0, 2.0])
        np.testing.assert_allclose(hvd.allreduce(x, hvd.Sum, prescale_factor=0.5, postscale_factor=4), x * size * 2)
        np.testing.assert_allclose(hvd.allreduce(x, prescale_factor=3), x * 3)
        assert hvd.allreduce(np.array([10]), hvd.Sum, prescale_factor=0.5).tolist() == [5 * size]
        y = np.arange(float(size))
        np.testing.assert_allclose(hvd.reducescatter(y, hvd.Sum, postscale_factor=0.5), y[[hvd.rank()]] * size / 2)

    ranks(check)


def test_alltoall_with_splits(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        splits = [(rank + dest) % 3 for dest in range(size)]
        x = torch.tensor([[10.0 * rank + dest] * 2 for dest in range(size) for _ in range(splits[dest])]).reshape(-1, 2)
        rows, received = hvd.alltoall(x, splits)
        expected = [(source + rank) % 3 for source in range(size)]
        assert received.tolist() == expected
        assert received.dtype is torch.int32
        assert rows[:, 0].tolist() == [10.0 * source + rank for source in range(size) for _ in range(expected[source])]

    ranks(check)


def test_algorithms_give_the_sum(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        for algorithm in ("ring", "tree", "butterfly", "rabenseifner", "parameter_server"):
            for length in (0, 1, 7, 1000):
                x = np.arange(length, dtype=np.float32) * (rank + 1)
                result = hvd.allreduce(x, hvd.Sum, algorithm=algorithm)
                np.testing.assert_array_equal(result, np.arange(length) * (size * (size + 1) // 2))

    ranks(check)


def test_more_than_mpi_counts_at_once(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start_mpi()  # which leaves no file in /dev/shm; the following import would
    from hvdlite.comm.mpi import collectives  # with ranks as threads this tests nothing new

    monkeypatch.setattr(collectives, "_LARGEST_BYTES", 64)

    def check() -> None:
        x = np.arange(1001.0)
        np.testing.assert_array_equal(hvd.allreduce(x, hvd.Sum), x * hvd.size())
        np.testing.assert_array_equal(hvd.broadcast(x * hvd.rank(), hvd.size() - 1), x * (hvd.size() - 1))

    ranks(check)


def test_objects(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        assert hvd.broadcast_object({"lr": rank, "none": None}, size - 1) == {"lr": size - 1, "none": None}
        assert hvd.allgather_object("x" * rank) == ["x" * r for r in range(size)]
        assert hvd.broadcast_object_async([rank], 0).wait() == [0]
        assert hvd.allgather_object_async(None).wait() == [None] * size

    ranks(check)


def test_asynchronous_forms(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        x = np.array([float(rank)] * size)
        handles = [
            hvd.allreduce_async(x, hvd.Sum),
            hvd.allgather_async(x[:1]),
            hvd.broadcast_async(x, size - 1),
            hvd.alltoall_async(x),
            hvd.reducescatter_async(x, hvd.Max),
            hvd.barrier_async(),
        ]
        results = [handle.wait() for handle in handles]
        assert all(handle.poll() for handle in handles)
        total = size * (size - 1) / 2
        everybody = [float(r) for r in range(size)]
        expected = [[total] * size, everybody, [size - 1.0] * size, everybody, [size - 1.0], None]
        assert [None if result is None else result.tolist() for result in results] == expected

    ranks(check)


def test_poll_alone_gets_there(ranks: Any) -> None:
    def check() -> None:
        handle = hvd.allreduce_async(np.ones(3), hvd.Sum, name="polled")
        while not handle.poll():
            pass
        assert handle.wait().tolist() == [hvd.size()] * 3

    ranks(check)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: hvd.allreduce(1.0), UnsupportedTensorError, "got builtins.float"),
        (lambda: hvd.allreduce("text"), UnsupportedTensorError, "got builtins.str"),
        (lambda: hvd.allreduce([[1.0]]), UnsupportedTensorError, "got builtins.list"),
        (lambda: hvd.allreduce(np.array(["a"])), UnsupportedTensorError, "expected numbers"),
        (lambda: hvd.allreduce(np.array([object()])), UnsupportedTensorError, "expected numbers"),
        (lambda: hvd.allreduce(np.ones(2, ">f4")), UnsupportedTensorError, "byte order"),
        (lambda: hvd.allreduce(torch.ones(2).to_sparse()), UnsupportedTensorError, "dense"),
        (lambda: hvd.allreduce(torch.ones(2, device="meta")), UnsupportedTensorError, "host memory"),
        (lambda: hvd.allreduce(np.ones(1, complex), hvd.Max), UnsupportedTensorError, "no order"),
        (lambda: hvd.allreduce(np.ones(1), "sum"), ArgumentError, "expected one of hvdlite.Sum"),
        (lambda: hvd.allreduce(np.ones(1), algorithm="star"), ArgumentError, "'ring'"),
        (lambda: hvd.broadcast(np.ones(1), 99), ArgumentError, "root_rank=99"),
        (lambda: hvd.broadcast(np.ones(1), -1), ArgumentError, "root_rank=-1"),
        (lambda: hvd.broadcast_object(1, 0.5), ArgumentError, "root_rank=0.5"),
        (lambda: hvd.alltoall(np.float64(1)), UnsupportedTensorError, "0-d"),
        (lambda: hvd.reducescatter(np.float64(1)), UnsupportedTensorError, "0-d"),
        (lambda: hvd.alltoall(np.ones(3), [1]), ArgumentError, "add up to the first dimension, 3"),
        (lambda: hvd.alltoall(np.ones(0), [-1, 1]), ArgumentError, "numbers >= 0"),
        (lambda: hvd.alltoall(np.ones(1), [0.5, 0.5]), ArgumentError, "whole numbers"),
    ],
)
def test_bad_arguments_raise_before_anything_is_sent(ranks: Any, call: Any, error: type, text: str) -> None:
    def check() -> None:
        with pytest.raises(error, match=text):
            call()
        assert hvd.allreduce(np.ones(1), hvd.Sum) == hvd.size()  # and the job goes on

    ranks(check)


def test_uneven_alltoall_needs_splits(ranks: Any) -> None:
    def check() -> None:
        if hvd.size() > 1:
            with pytest.raises(ArgumentError, match="Pass splits"):
                hvd.alltoall(np.ones(hvd.size() + 1))

    ranks(check)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("op", [hvd.Min, hvd.Max], ids=repr)
def test_no_nan_is_lost(ranks: Any, op: hvd.ReduceOp, dtype: str) -> None:
    """Small tensors go to MPI, larger ones through shared memory; and by messages where an algorithm is named."""

    def on_rank() -> None:
        for length in (1, 1024, 1025, 40_000):
            for who in range(hvd.size()):
                x = torch.ones(length, dtype=getattr(torch, dtype))
                if hvd.rank() == who:
                    x[length // 2] = float("nan")
                algorithms = ["auto", "ring"] if length < 2000 else ["auto"]
                results = [hvd.allreduce(x, op, algorithm=algorithm) for algorithm in algorithms]
                pieces = [hvd.reducescatter(x, op)]
                results.append(torch.cat(hvd.allgather_object(pieces[0])))
                for result in results:
                    assert result.isnan().nonzero().flatten().tolist() == [length // 2]
                    assert result.nansum(dtype=torch.float64) == length - 1

    ranks(on_rank)
