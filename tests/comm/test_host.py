"""Collectives through shared memory, against NumPy; and what happens where memory cannot be shared."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdlite as hvd
import hvdlite.comm.host
from hvdlite.algorithms.slices import slices
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.host import Host
from hvdlite.comm.host_collectives import HostCollectives
from hvdlite.comm.local import LocalFabric, LocalTransport
from hvdlite.comm.point_to_point import PointToPointCollectives
from hvdlite.comm.shared_memory import SharedMemoryError, share
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, MismatchError, PeerLeftError
from hvdlite.protocols import Array, ReduceOp
from hvdlite.tensors.halves import NumpyHalf
from hvdlite.tensors.reduction import reduction
from hvdlite.testing import on_ranks
from hvdlite_torch.tensors.adapter import TorchHalf

UFUNCS = {ReduceOp.SUM: np.add, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}
DTYPES = ["float32", "float64", "int32", "int8", "float16", "bfloat16", "complex64"]
ROOM = 256
"""Bytes per slot: small, so that little data takes many blocks."""


def numbers(dtype: str, length: int, rank: int) -> Array:
    """Small whole numbers: exact in every dtype, whatever the order of a reduction."""
    values = np.random.default_rng([rank, length]).integers(-2, 3, length).astype(np.float64)
    return values.astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else values.astype(dtype)


def bits(array: Array) -> Array:
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def on_hosts(hosts: list[int], work: Callable[[HierarchicalCollectives, LocalTransport], Any]) -> list[Any]:
    def rank(transport: LocalTransport) -> Any:
        collectives = HierarchicalCollectives(transport.duplicate(), hosts, PointToPointCollectives)
        if collectives._here is not None:
            collectives._here = HostCollectives(collectives.host, ROOM)
        try:
            return work(collectives, transport)
        finally:
            collectives.close()

    return LocalFabric(len(hosts), hosts=hosts).run(rank, 30)


HOSTS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(HOSTS, st.sampled_from(DTYPES), st.sampled_from(list(UFUNCS)), st.lists(st.integers(0, 700), max_size=4))
def test_allreduce(hosts: list[int], dtype: str, op: ReduceOp, lengths: list[int]) -> None:
    """Several in a row, so that each begins in the slots that the one before has used."""
    if dtype == "complex64" and op in (ReduceOp.MIN, ReduceOp.MAX):
        return
    if op is ReduceOp.PRODUCT:
        hosts = hosts[:4]  # 2 ** 4 is within every dtype

    def work(collectives: HierarchicalCollectives, _: LocalTransport) -> list[Array]:
        results = []
        for length in lengths:
            data = numbers(dtype, length, collectives.rank)
            collectives.allreduce(bits(data), reduction(dtype, op))
            results.append(data)
        return results

    everybody = on_hosts(hosts, work)
    for index, length in enumerate(lengths):
        given_ = [numbers(dtype, length, rank) for rank in range(len(hosts))]
        expected = UFUNCS[op].reduce([each if dtype == "complex64" else each.astype(np.float64) for each in given_])
        for results in everybody:
            np.testing.assert_array_equal(results[index].astype(expected.dtype), expected)


@given(HOSTS, st.sampled_from(["float32", "float16", "bfloat16"]), st.integers(0, 700))
def test_every_rank_has_the_same_bits_and_a_division_is_made_once(hosts: list[int], dtype: str, length: int) -> None:
    def values(rank: int) -> Array:
        exact = np.random.default_rng([rank, length]).normal(size=length)
        return exact.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def work(collectives: HierarchicalCollectives, _: LocalTransport) -> Array:
        data = values(collectives.rank)
        collectives.allreduce(bits(data), reduction(dtype, ReduceOp.AVERAGE, size=3))
        return data

    results = on_hosts(hosts, work)
    expected = sum(values(rank).astype(np.float64) for rank in range(len(hosts))) / 3
    for result in results:
        np.testing.assert_array_equal(bits(result), bits(results[0]))
    step = {"float32": 1e-6, "float16": 2**-11, "bfloat16": 2**-8}[dtype]  # one rounding, and not one per rank
    np.testing.assert_allclose(results[0].astype(np.float64), expected, rtol=1.001 * step, atol=1e-5)


@given(HOSTS, st.data())
def test_allgather_broadcast_and_reduce_scatter(hosts: list[int], data: st.DataObject) -> None:
    size = len(hosts)
    counts = data.draw(st.lists(st.integers(0, 200), min_size=size, max_size=size))
    root = data.draw(st.integers(0, size - 1))
    parts = [numbers("float32", count, rank) for rank, count in enumerate(counts)]
    wholes = [numbers("float32", sum(counts), rank) for rank in range(size)]

    def work(collectives: HierarchicalCollectives, _: LocalTransport) -> tuple[Array, Array, Array]:
        rank = collectives.rank
        gathered = np.empty(sum(counts), np.float32)
        collectives.allgather(parts[rank], gathered, counts)
        sent = wholes[rank].copy()
        collectives.broadcast(sent, root)
        scattered = np.empty(counts[rank], np.float32)
        collectives.reduce_scatter(wholes[rank], scattered, counts, ReduceOp.SUM)
        collectives.barrier()
        return gathered, sent, scattered

    for rank, (gathered, sent, scattered) in enumerate(on_hosts(hosts, work)):
        np.testing.assert_array_equal(gathered, np.concatenate(parts))
        np.testing.assert_array_equal(sent, wholes[root])
        np.testing.assert_array_equal(scattered, np.add.reduce(wholes)[slices(counts)[rank]])


@given(HOSTS, st.sampled_from(["int8", "float32", "complex64"]), st.data())
def test_alltoall(hosts: list[int], dtype: str, data: st.DataObject) -> None:
    """Twice, so that the second begins in the slots that the first has used."""
    size = len(hosts)
    rows = st.lists(st.integers(0, 300), min_size=size, max_size=size)
    counts = np.array(data.draw(st.lists(rows, min_size=size, max_size=size)))
    sent = [[numbers(dtype, counts[rank, to], 10 * rank + to) for to in range(size)] for rank in range(size)]

    def work(collectives: HierarchicalCollectives, _: LocalTransport) -> list[Array]:
        rank = collectives.rank
        results = []
        for _ in range(2):
            out = np.empty(counts[:, rank].sum(), dtype)
            collectives.alltoall(np.concatenate(sent[rank]), counts[rank], out, counts[:, rank])
            results.append(out)
        return results

    for rank, results in enumerate(on_hosts(hosts, work)):
        for out in results:
            np.testing.assert_array_equal(out, np.concatenate([sent[source][rank] for source in range(size)]))


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 0, 1]])
def test_alltoall_with_counts_that_do_not_fit_raises_on_all_ranks_and_they_go_on(hosts: list[int]) -> None:
    def work(collectives: HierarchicalCollectives, _: LocalTransport) -> float:
        expected = [2, 2, 2] if collectives.rank == 2 else [1, 1, 1]
        with pytest.raises(MismatchError, match="rank 0 of the group sends 1 elements to rank 2, which expects 2"):
            collectives.alltoall(np.zeros(3), [1, 1, 1], np.zeros(sum(expected)), expected)
        total = np.ones(1)
        collectives.allreduce(total, ReduceOp.SUM)
        return float(total[0])

    assert on_hosts(hosts, work) == [3.0] * 3


@pytest.mark.parametrize("root", range(4))
def test_broadcast_where_hosts_are_in_another_order_for_each_number(root: int) -> None:
    """Ranks numbered 0: 0 on host 1, 1 on host 0. Ranks numbered 1: 2 on host 0, 3 on host 1."""

    def work(collectives: HierarchicalCollectives, _: LocalTransport) -> float:
        data = np.full(3, float(collectives.rank))
        collectives.broadcast(data, root)
        return float(data.sum())

    assert on_hosts([1, 0, 0, 1], work) == [3.0 * root] * 4


@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.sampled_from(["float16", "bfloat16"]))
def test_halves_without_torch_are_those_of_torch(values: list[float], dtype: str) -> None:
    wide = np.array(values, np.float32)
    halves = []
    for half in (NumpyHalf(dtype), TorchHalf(dtype)):
        out = np.zeros(len(wide), np.float16 if dtype == "float16" else np.uint16)
        with np.errstate(all="ignore"):
            half.narrow(wide, out)
            back = np.empty_like(wide)
            half.widen(out, back)
            half.accumulate(np.add, back, out)
        halves.append((out, back))
    (mine, my_sum), (theirs, their_sum) = halves
    np.testing.assert_array_equal(my_sum, their_sum)
    numbers_only = ~np.isnan(wide)
    np.testing.assert_array_equal(mine.view(np.uint16)[numbers_only], theirs.view(np.uint16)[numbers_only])


def named_memory() -> set[str]:
    """The files of /dev/shm that this process has mapped; others may come and go at any time."""
    words = Path("/proc/self/maps").read_text().split()
    return {word for word in words if word.startswith("/dev/shm/") and os.path.exists(word)}


def test_memory_is_seen_by_all_and_nothing_has_a_name() -> None:
    before = named_memory()

    def rank(transport: LocalTransport) -> None:
        memory = share(transport, 100_000)
        host = Host(transport.duplicate())
        memory[transport.rank] = transport.rank + 1
        host.meet()
        assert memory[:4].tolist() == [1, 2, 3, 0]
        assert named_memory() == before

    LocalFabric(3).run(rank, 10)


@pytest.mark.parametrize("missing", ["memfd_create", "open"])
def test_without_shared_memory_messages_do_it(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """No memfd, as outside of Linux; /proc of the others out of sight, as in containers of their own."""

    def refuse(*_: Any) -> int:
        raise OSError("refused")

    monkeypatch.setattr(os, missing, refuse)

    def rank(transport: LocalTransport) -> None:
        with pytest.raises(SharedMemoryError, match="memory"):
            share(transport, 10)

    LocalFabric(2).run(rank, 10)

    def check() -> None:
        assert hvd.allreduce(np.ones(3), hvd.Sum).tolist() == [3.0] * 3
        with pytest.raises(ArgumentError, match="no two ranks of this group share memory"):
            hvd.allreduce(np.ones(3), algorithm="shared_memory")

    with pytest.warns(RuntimeWarning, match="Messages are used in its place"):
        on_ranks(3, check)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks(3, check, config=Config(shared_memory=False))


def test_another_process_of_the_same_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another container the same path may be another file."""
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: real(*args)[::-1])

    def rank(transport: LocalTransport) -> None:
        with pytest.raises(SharedMemoryError, match="containers"):
            share(transport, 10)

    LocalFabric(2).run(rank, 10)


def test_processors_that_reorder_writes_meet_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvdlite.comm.host, "ORDERED", False)
    for result in on_ranks(3, lambda: [hvd.allreduce(np.full(n, 1.0), hvd.Sum).sum() for n in (1, 5000)]):
        assert result == [3.0, 15000.0]


def test_a_rank_that_fails_frees_those_that_wait_for_it() -> None:
    def rank(transport: LocalTransport) -> None:
        host = Host(transport)
        if transport.rank == 1:
            raise ZeroDivisionError("on purpose")
        with pytest.raises(PeerLeftError, match="on purpose"):
            host.meet()

    with pytest.raises(ZeroDivisionError):
        LocalFabric(3).run(rank, 10)


def test_slots_do_not_depend_on_the_dtype_of_the_sum() -> None:
    """A widened sum takes twice the bytes of its slot."""
    how = reduction("bfloat16", ReduceOp.SUM)

    def rank(transport: LocalTransport) -> Array:
        data = numbers("bfloat16", 5 * ROOM, transport.rank)
        HostCollectives(Host(transport), ROOM).allreduce(bits(data), how)
        return data.astype(np.float64)

    for result in LocalFabric(3).run(rank, 10):
        np.testing.assert_array_equal(
            result, sum(numbers("bfloat16", 5 * ROOM, r).astype(np.float64) for r in range(3))
        )
