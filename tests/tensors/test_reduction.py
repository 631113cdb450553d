"""How values become one: `Reduction` beside NumPy in float64, Python's integers and ml_dtypes."""

from __future__ import annotations

import math
from functools import reduce

import ml_dtypes
import numpy as np
import pytest

from hvdlite.protocols import Array, ReduceOp
from hvdlite.tensors.reduction import Reduction, average_long, reduction

OPS = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT, ReduceOp.AVERAGE)


def result_of(how: Reduction, sources: list[Array]) -> Array:
    """What the mover of the data makes of the ranks' arrays: where it has all of them, and where some come by messages."""
    wide, out = np.empty(sources[0].size, how.wide_dtype), np.empty_like(sources[0])
    how.complete(sources, wide, out)
    here, there = sources[:-1], sources[-1:]
    by_messages = np.empty_like(out)
    if how.is_long_average:
        sums: list[list[Array]] = []
        for ranks in (here, there):  # each notes the parts that it would send
            sums.append([])
            average_long(how, ranks, np.empty_like(out), lambda part: sums[-1].append(part) or part)
        totals = [one + other for one, other in zip(*sums, strict=True)]
        average_long(how, here, by_messages, lambda part: totals.pop(0))
    else:
        how.partial(here, wide)
        other = np.empty_like(wide)
        how.partial(there, other)
        reduction(how.wide, how.combining).combine((wide, other), wide)
        how.conclude(wide)
        how.narrow(wide, by_messages)
    np.testing.assert_array_equal(by_messages, out)
    return out


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "uint64"])
def test_integers(dtype: str, op: ReduceOp) -> None:
    """Beside Python's integers, which have no end: averages do not overflow, and everything else wraps around."""
    limits = np.iinfo(dtype)
    columns = [
        (1, 2, 3),
        (limits.max, limits.max, limits.max - 1),
        (limits.min, limits.min, 5),
        (0, 0, 1),
        (limits.max,) * 3,
    ]
    columns += [(limits.min, limits.min, limits.min), (limits.min, limits.min, limits.min + 1)]
    columns += [(-1, 0, 0), (-2, -3, -5)] if limits.min else []
    sources = [np.array([column[rank] for column in columns], dtype) for rank in range(3)]
    how = reduction(dtype, op, size=3)
    expected = []
    for column in columns:
        value = {
            ReduceOp.SUM: sum(column),
            ReduceOp.MIN: min(column),
            ReduceOp.MAX: max(column),
            ReduceOp.PRODUCT: math.prod(column),
            ReduceOp.AVERAGE: (abs(sum(column)) // 3) * (-1 if sum(column) < 0 else 1),
        }[op]
        expected.append((value - limits.min) % 2**limits.bits + limits.min)
    assert [int(each) for each in result_of(how, sources)] == expected


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "complex64"])
def test_an_average_that_fits_is_right_where_the_sum_does_not(dtype: str, size: int) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    most = 0.99 * float(ml_dtypes.finfo(kind).max if dtype == "bfloat16" else np.finfo(kind).max)
    rows = [[most, -most, 1.0, 0.5 * most, np.inf, np.nan, 1e-3]] * size
    rows = [[*row, most if rank else -most] for rank, row in enumerate(rows)]
    stored = [np.array(row).astype(kind) for row in rows]
    sources = [each.view(np.uint16) if dtype == "bfloat16" else each for each in stored]
    with np.errstate(all="ignore"):
        got = result_of(reduction(dtype, ReduceOp.AVERAGE, size=size), sources).view(kind)
        wide = np.complex128 if dtype.startswith("complex") else np.float64
        expected = np.mean([each.astype(wide) / size for each in stored], axis=0) * size
    tolerance = 1e-2 if dtype == "bfloat16" else 1e-6
    np.testing.assert_allclose(got.astype(wide), expected.astype(kind).astype(wide), rtol=tolerance)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_floats_are_rounded_once(dtype: str, op: ReduceOp) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    values = [np.random.default_rng(rank).normal(size=1000).astype(kind) for rank in range(3)]
    stored = [each.view(np.uint16) if dtype == "bfloat16" else each for each in values]
    how = reduction(dtype, op, after=0.5, size=3)
    got = result_of(how, stored).view(kind)
    wide = [each.astype(np.float64 if dtype == "float64" else np.float32) for each in values]
    ufunc = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}.get(op, np.add)
    exact = reduce(ufunc, wide)
    if op is ReduceOp.AVERAGE:
        exact = exact / 3
    np.testing.assert_array_equal(got, (exact * 0.5).astype(kind))


def test_bools() -> None:
    """As the bytes that they are."""
    columns = np.array([[0, 0], [0, 1], [1, 1]], np.uint8)
    sources = [columns[:, 0].copy(), columns[:, 1].copy()]
    for op, expected in ((ReduceOp.MAX, [0, 1, 1]), (ReduceOp.MIN, [0, 0, 1]), (ReduceOp.PRODUCT, [0, 0, 1])):
        how = reduction("bool", op)
        assert how.storage == np.uint8
        assert result_of(how, sources).tolist() == expected


def test_a_result_may_be_accumulated_in_place_where_the_dtype_stays() -> None:
    assert reduction("float32", ReduceOp.AVERAGE, size=2).exact
    assert reduction("uint64", ReduceOp.AVERAGE, size=2).exact
    assert not reduction("int32", ReduceOp.AVERAGE, size=2).exact
    assert not reduction("bfloat16", ReduceOp.SUM).exact
    one, other = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    how = reduction("float64", ReduceOp.SUM)
    how.combine((one, other), other)
    assert other.tolist() == [4.0, 6.0]
    how.combine((other,), other)
    assert other.tolist() == [4.0, 6.0]


@pytest.mark.parametrize("op", [*OPS, ReduceOp.ADASUM])
@pytest.mark.parametrize("dtype", ["bool", "int16", "uint8", "float16", "bfloat16", "float64"])
def test_a_neutral_rank_changes_nothing(dtype: str, op: ReduceOp) -> None:
    how = reduction(dtype, op)
    nothing = np.full(3, 7, how.storage)
    how.neutralize(nothing)
    if op is ReduceOp.ADASUM:
        assert not nothing.any()
        return
    values = np.array([0, 1, 1], how.storage)  # small integers: as bits of bfloat16 tiny numbers, as exact
    if dtype not in ("bool", "uint8", "bfloat16"):
        values = np.array([-3, 0, 2], how.storage)
    np.testing.assert_array_equal(result_of(how, [values, nothing]), values)
    np.testing.assert_array_equal(result_of(how, [nothing, values]), values)


def test_values_that_are_scaled_are_wide_before() -> None:
    how = reduction("int8", ReduceOp.AVERAGE, 100.0, size=2).widened
    values = np.array([100, -100], np.int64)
    how.scale(values)
    assert values.tolist() == [10_000, -10_000]
    assert how.exact
    assert (how.dtype, how.before, how.divide_by) == ("int64", 100.0, 2)
    halves = reduction("float16", ReduceOp.SUM, 0.5).widened
    assert (halves.dtype, halves.storage) == ("float32", np.float32)


def test_equal_arguments_give_the_same_object() -> None:
    assert reduction("int8", ReduceOp.SUM, 2.0) is reduction("int8", ReduceOp.SUM, 2.0)
    assert reduction("int8", ReduceOp.SUM, size=3) == reduction("int8", ReduceOp.SUM, size=5)  # nothing is divided
