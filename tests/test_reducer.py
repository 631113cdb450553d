"""Buckets: how tensors are shared out among them, and what an exchange does, against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import TensorInfo
from hvdlite.reducer import plan_buckets, wire_dtype
from hvdlite.testing import on_ranks

INFOS = st.lists(
    st.builds(
        TensorInfo,
        st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
        st.lists(st.integers(0, 6), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=12,
)


def nbytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * wire_dtype(info.dtype).itemsize


@given(INFOS, st.integers(1, 2000))
def test_every_tensor_is_in_one_bucket_of_its_dtype(infos: list[TensorInfo], limit: int) -> None:
    buckets = plan_buckets(infos, limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(infos)))
    for bucket in buckets:
        assert bucket == sorted(bucket, reverse=True)  # in the order in which a backward pass has them
        assert len({wire_dtype(infos[index].dtype) for index in bucket}) == 1
        assert len(bucket) == 1 or sum(nbytes(infos[index]) for index in bucket) <= limit


@given(INFOS, st.integers(1, 4), st.data())
def test_an_exchange_is_a_weighted_average(infos: list[TensorInfo], size: int, data: st.DataObject) -> None:
    used = data.draw(
        st.lists(st.lists(st.booleans(), min_size=len(infos), max_size=len(infos)), min_size=size, max_size=size)
    )
    weights = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any))
    seed = np.random.default_rng(0)
    values = [[seed.normal(size=math.prod(info.shape)) for info in infos] for _ in range(size)]

    def exchange() -> tuple[list[bool], list[np.ndarray]]:
        reducer = world().reducer(infos)
        for index in range(len(infos)):
            # what a rank does not use is garbage from before, and must not count
            reducer.memory_of(index)[:] = values[hvd.rank()][index] if used[hvd.rank()][index] else np.nan
        anywhere = reducer.exchange(used[hvd.rank()], float(weights[hvd.rank()]))
        return anywhere, [reducer.memory_of(index).copy() for index in range(len(infos))]

    for anywhere, results in on_ranks(size, exchange):
        assert anywhere == [any(used[r][index] for r in range(size)) for index in range(len(infos))]
        for index, result in enumerate(results):
            total = sum(weights[r] * values[r][index] * used[r][index] for r in range(size))
            np.testing.assert_allclose(result, total / sum(weights), rtol=1e-5, atol=1e-5)


def test_integers_have_no_gradients() -> None:
    def check() -> None:
        with pytest.raises(UnsupportedTensorError, match="int32"):
            world().reducer([TensorInfo("int32", (1,))])

    on_ranks(1, check)
