"""Buckets: how tensors are shared out among them, and what an exchange does, against NumPy."""

from __future__ import annotations

import math
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.config import Config
from hvdlite.errors import UnsupportedTensorError
from hvdlite.gradients.header import Header
from hvdlite.gradients.layout import lay_out, pieces
from hvdlite.protocols import TensorInfo
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


@given(INFOS, st.integers(1, 7), st.booleans())
def test_every_element_is_in_one_part(infos: list[TensorInfo], parts: int, whole: bool) -> None:
    blocks = lay_out(infos, parts, whole)
    assert sorted(index for block in blocks for index in block.spans) == list(range(len(infos)))
    covered: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(infos))}
    for block in blocks:
        assert {infos[index].dtype for index in block.spans} == {block.dtype}
        assert all(stop - start == math.prod(infos[index].shape) for index, (start, stop) in block.spans.items())
        assert len(block.bounds) == parts + 1
        ends = sorted(block.spans.values())
        assert all(before.stop <= after.start for before, after in pairwise(ends))  # no two share memory
        for part in range(parts):
            for piece in pieces(block, part):
                covered[piece.tensor].append((piece.start, piece.stop))
    for index, info in enumerate(infos):
        parts_of = sorted(covered[index])
        assert [start for start, _ in parts_of] == [0, *(stop for _, stop in parts_of)][: len(parts_of)]
        assert sum(stop - start for start, stop in parts_of) == math.prod(info.shape)
        assert len(parts_of) <= 1 or not whole


def store(memory: np.ndarray, dtype: str, values: np.ndarray) -> None:
    memory[:] = values.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == "bfloat16" else values


def load(memory: np.ndarray, dtype: str) -> np.ndarray:
    return (memory.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else memory).astype(np.float64)


TOLERANCES = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 1e-5, "float64": 1e-12}


@given(INFOS, st.lists(st.integers(0, 2), min_size=1, max_size=5), st.booleans(), st.booleans(), st.data())
def test_an_exchange_is_a_weighted_average(
    infos: list[TensorInfo], hosts: list[int], shared_memory: bool, equal: bool, data: st.DataObject
) -> None:
    size = len(hosts)
    used = data.draw(
        st.lists(st.lists(st.booleans(), min_size=len(infos), max_size=len(infos)), min_size=size, max_size=size)
    )
    weights = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any))
    if equal:
        weights = [1] * size
    seed = np.random.default_rng(0)
    values = [[seed.normal(size=math.prod(info.shape)) for info in infos] for _ in range(size)]

    def exchange() -> tuple[list[bool], list[np.ndarray]]:
        reducer = world().group().reducers.make(infos)
        for index, info in enumerate(infos):
            # what a rank does not use is garbage from before, and must not count
            mine = values[hvd.rank()][index]
            store(reducer.memory_of(index), info.dtype, mine if used[hvd.rank()][index] else np.full_like(mine, np.nan))
        anywhere = reducer.exchange(used[hvd.rank()], Header(float(weights[hvd.rank()])))
        return anywhere, [load(reducer.memory_of(index), info.dtype) for index, info in enumerate(infos)]

    for anywhere, results in on_ranks(size, exchange, hosts=hosts, config=Config(shared_memory=shared_memory)):
        assert anywhere == [any(used[r][index] for r in range(size)) for index in range(len(infos))]
        for index, (info, result) in enumerate(zip(infos, results, strict=True)):
            total = sum(weights[r] * values[r][index] * used[r][index] for r in range(size)) / sum(weights)
            tolerance = TOLERANCES[info.dtype]
            np.testing.assert_allclose(result, total, rtol=tolerance, atol=tolerance)


def test_integers_have_no_gradients() -> None:
    def check() -> None:
        with pytest.raises(UnsupportedTensorError, match="int32"):
            world().group().reducers.make([TensorInfo("int32", (1,))])

    on_ranks(1, check)
