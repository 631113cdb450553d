"""Results that a framework holds without a copy: nobody overwrites them, and all ranks of a host share one memory for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hvdlite
import hvdlite.gradients.bucket
from hvdlite.api import world
from hvdlite.protocols import TensorInfo
from hvdlite.testing import on_ranks

INFOS = [
    TensorInfo("float32", (40, 30)),
    TensorInfo("float64", (7,)),
    TensorInfo("float32", (5,)),
    TensorInfo("bfloat16", (3,)),
]
ROOMS = 2


@pytest.fixture(autouse=True, params=[0, 2**14])
def large(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvdlite.gradients.bucket, "LARGE_BYTES", request.param)


def make() -> Any:
    here = world()
    return here.group().reducers.make(INFOS, hvdlite.Average, here.group().reducers.plan._replace(lend=ROOMS))


def exchange(reducer: Any, step: int) -> list[Any]:
    """Exchange gradients that are rank + step everywhere; the results, as they lie."""
    for index, info in enumerate(INFOS):
        value: Any = np.full(np.prod(info.shape), hvdlite.rank() + step, np.float32)
        array = (
            (value.view(np.uint32) >> 16).astype(np.uint16) if info.dtype == "bfloat16" else value.astype(info.dtype)
        )
        start, stop = reducer.bucket_of(index).ownership.part_of(index)
        memory = reducer.memory_of(index)
        memory[:start], memory[stop:] = array[:start], array[stop:]
        if start < stop:
            memory[start:stop] = 99  # nobody is to look there
            reducer.bucket_of(index).place(index, array[start:stop])
    assert all(reducer.exchange([True] * len(INFOS)))
    return [reducer.result_of(index) for index in range(len(INFOS))]


def assert_right(results: list[Any], step: int) -> None:
    expected = np.float32(step + (hvdlite.size() - 1) / 2)
    for info, result in zip(INFOS, results, strict=True):
        bits = info.dtype == "bfloat16"
        assert (result == (expected.view(np.uint32) >> 16 if bits else expected)).all()


@pytest.mark.parametrize("hosts", [[0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 1]])
def test_what_is_held_is_not_overwritten(hosts: list[int]) -> None:
    def check() -> None:
        reducer = make()
        held = [exchange(reducer, step) for step in range(ROOMS)]
        assert all(reducer.is_lent(index) for index in range(len(INFOS)))
        for step in range(ROOMS, ROOMS + 3):  # no room is left: these results are good until the next exchange
            assert_right(exchange(reducer, step), step)
            assert not any(reducer.is_lent(index) for index in range(len(INFOS)))
        for step, results in enumerate(held):
            assert_right(results, step)

    on_ranks(len(hosts), check, hosts=hosts)


def test_a_room_is_used_again_when_all_ranks_have_let_go() -> None:
    def check() -> None:
        reducer = make()
        first = exchange(reducer, 0)[0]
        view = first[10:12].reshape(2, 1).view(np.uint8)  # of a view of a view
        place = first.ctypes.data
        if hvdlite.rank() == 0:
            del first
            hvdlite.barrier()
        else:
            hvdlite.barrier()
            del first
        assert exchange(reducer, 1)[0].ctypes.data != place
        del view
        hvdlite.barrier()
        assert exchange(reducer, 2)[0].ctypes.data == place

    on_ranks(2, check)


def test_one_rank_that_holds_is_enough() -> None:
    def check() -> None:
        reducer = make()
        held = [exchange(reducer, 0)] if hvdlite.rank() == 1 else exchange(reducer, 0) and []
        for step in range(1, 5):
            assert_right(exchange(reducer, step), step)
        for results in held:
            assert_right(results, 0)

    on_ranks(3, check)


def test_ranks_of_a_host_write_each_result_once() -> None:
    """They see the same memory, in place of one each."""

    def check() -> None:
        results = exchange(make(), 0)
        hvdlite.barrier()
        if hvdlite.rank() == 0:
            results[0][:] = 123  # nobody should; here it shows what is shared
        hvdlite.barrier()
        assert (results[0] == 123).all()

    on_ranks(2, check)
