"""The collective algorithms against NumPy, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.algorithms import ALGORITHMS
from hvdlite.algorithms.choose import LATENCY_BYTES
from hvdlite.algorithms.fold import Core
from hvdlite.algorithms.reduce import binomial_reduce
from hvdlite.algorithms.slices import slices, split
from hvdlite.comm.local import LocalFabric, LocalTransport
from hvdlite.comm.point_to_point import PointToPointCollectives
from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array, Collectives, ReduceOp, Transport, numpy_combine

TIMEOUT = 20.0
OPS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
DTYPES = ["?", "i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]

dtypes = st.sampled_from(DTYPES)
ops = st.sampled_from(list(OPS))
few = settings(max_examples=60, deadline=None)


def values(length: int, dtype: str, seed: int) -> Array:
    """Whole numbers of which sums and products of a dozen are exact in any of the dtypes, or wrap alike."""
    return np.random.default_rng(seed).integers(1, 3, length).astype(dtype)


def reduced(arrays: Sequence[Array], op: ReduceOp) -> Array:
    """The reduction of the ranks' arrays by NumPy."""
    result: Array = reduce(OPS[op], arrays)
    return result


def allreduce(algorithm: str, arrays: Sequence[Array], op: ReduceOp = ReduceOp.SUM) -> list[Array]:
    """Every rank's result of an allreduce of `arrays`."""

    def on_rank(transport: LocalTransport) -> Array:
        data: Array = arrays[transport.rank].copy()
        ALGORITHMS[algorithm](transport, data, numpy_combine(op))
        return data

    return LocalFabric(len(arrays)).run(on_rank, TIMEOUT)


@pytest.mark.parametrize("length", [0, 1, 7, 1000, 1_000_003])
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_exactly(algorithm: str, size: int, length: int) -> None:
    for dtype in ("f4", "f8") if length <= 1000 else ("f4",):
        rng = np.random.default_rng(size)
        arrays = [rng.integers(-1000, 1000, length).astype(dtype) for _ in range(size)]
        expected = np.sum(arrays, axis=0, dtype=dtype)
        for result in allreduce(algorithm, arrays):
            np.testing.assert_array_equal(result, expected, strict=True)


@pytest.mark.parametrize("size", range(2, 12))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_same_bits_on_every_rank(algorithm: str, size: int) -> None:
    rng = np.random.default_rng(size)
    rounded = [rng.normal(size=501).astype("f4") for _ in range(size)]
    # The minimum of +0 and -0 depends on the order of the operands, and so does which of two NaNs remains.
    zeros = [np.copysign(np.zeros(501, "f4"), rng.normal(size=501).astype("f4")) for _ in range(size)]
    nans = [(rng.integers(1, 1000, 501, dtype="u4") | np.uint32(0x7FC00000)).view("f4") for _ in range(size)]
    for arrays, op in ((rounded, ReduceOp.SUM), (zeros, ReduceOp.MIN), (zeros, ReduceOp.MAX), (nans, ReduceOp.SUM)):
        assert len({result.tobytes() for result in allreduce(algorithm, arrays, op)}) == 1


@given(
    algorithm=st.sampled_from(list(ALGORITHMS)),
    size=st.integers(1, 12),
    length=st.integers(0, 40),
    dtype=dtypes,
    op=ops,
)
@few
def test_any_ranks_length_dtype_and_op(algorithm: str, size: int, length: int, dtype: str, op: ReduceOp) -> None:
    arrays = [values(length, dtype, seed) for seed in range(size)]
    for result in allreduce(algorithm, arrays, op):
        np.testing.assert_array_equal(result, reduced(arrays, op), strict=True)


@pytest.mark.parametrize("op", list(OPS))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_operations(algorithm: str, op: ReduceOp) -> None:
    arrays = [np.random.default_rng(seed).integers(-9, 10, 50).astype("f8") for seed in range(6)]
    for result in allreduce(algorithm, arrays, op):
        np.testing.assert_array_equal(result, reduced(arrays, op))


@pytest.mark.parametrize("size", range(1, 18))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_messages_and_bytes(algorithm: str, size: int) -> None:
    core = Core(size)
    lg = core.size.bit_length() - 1
    length = size * core.size  # all slices are equal
    fabric = LocalFabric(size)

    def on_rank(transport: LocalTransport) -> None:
        ALGORITHMS[algorithm](transport, np.zeros(length), numpy_combine(ReduceOp.SUM))

    fabric.run(on_rank, TIMEOUT)
    sent = [fabric.traffic(rank) for rank in range(size)]
    # The sums over the ranks; bytes in units of the whole vector, times the length to stay whole.
    messages, elements = {
        "ring": (2 * size * (size - 1), 2 * (size - 1) * length),
        "tree": (2 * (size - 1), 2 * (size - 1) * length),
        "butterfly": (core.size * lg + 2 * core.extra, (core.size * lg + 2 * core.extra) * length),
        "rabenseifner": (2 * core.size * lg + 2 * core.extra, 2 * (core.size - 1 + core.extra) * length),
        "parameter_server": (2 * (size - 1), 2 * (size - 1) * length),
    }[algorithm]
    assert sum(traffic.messages for traffic in sent) == messages
    assert sum(traffic.bytes for traffic in sent) == 8 * elements
    if algorithm == "ring":
        assert len(set(sent)) == 1, "every rank carries the same share"


class Rendezvous:
    """A transport whose `send` returns only when the receiver has the data, as MPI's may."""

    def __init__(self, transport: LocalTransport) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.poll, self.post = transport.poll, transport.post
        self.duplicate, self.subgroup, self.close = transport.duplicate, transport.subgroup, transport.close
        self._data, self._acks = transport, transport.duplicate()
        self._ack = np.empty(0)

    def send(self, data: Array, dest: int) -> None:
        self._data.send(data, dest)
        self._acks.recv(self._ack, dest)

    def recv(self, data: Array, source: int) -> None:
        self._data.recv(data, source)
        self._acks.send(self._ack, source)

    def sendrecv(self, send: Array, dest: int, recv: Array, source: int) -> None:
        assert not np.may_share_memory(send, recv)
        self._data.send(send, dest)
        self.recv(recv, source)
        self._acks.recv(self._ack, dest)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8])
def test_nothing_relies_on_buffered_sends(size: int) -> None:
    def on_rank(local: LocalTransport) -> None:
        transport: Transport = Rendezvous(local)
        collectives = PointToPointCollectives(transport)
        counts = [2] * size
        for algorithm in ALGORITHMS:
            data = np.full(2 * size, 1.0)
            collectives.allreduce(data, ReduceOp.SUM, algorithm)
            np.testing.assert_array_equal(data, size)
        collectives.broadcast(np.zeros(3), size - 1)
        collectives.allgather(np.zeros(2), np.zeros(2 * size), counts)
        collectives.alltoall(np.zeros(2 * size), counts, np.zeros(2 * size), counts)
        collectives.reduce_scatter(np.zeros(2 * size), np.zeros(2), counts, ReduceOp.SUM)
        collectives.barrier()

    LocalFabric(size).run(on_rank, TIMEOUT)


@given(length=st.integers(0, 10_000), parts=st.integers(1, 300))
def test_slices_cover_everything_evenly(length: int, parts: int) -> None:
    counts = split(length, parts)
    assert len(counts) == parts
    assert max(counts) - min(counts) <= 1
    covered = [index for part in slices(counts) for index in range(length)[part]]
    assert covered == list(range(length))


@given(size=st.integers(1, 1000))
def test_core_is_the_largest_power_of_two(size: int) -> None:
    core = Core(size)
    assert core.size <= size < 2 * core.size
    assert core.size & (core.size - 1) == 0
    members = [rank for rank in range(size) if core.index(rank) is not None]
    assert [core.rank(index) for index in range(core.size)] == members
    assert [core.index(rank) for rank in members] == list(range(core.size))
    outside = set(range(size)) - set(members)
    assert all(rank - 1 in members for rank in outside)
    assert len(outside) == core.extra


@given(size=st.integers(1, 12), length=st.integers(0, 40), dtype=dtypes, op=ops, data=st.data())
@few
def test_reduce_to_any_root(size: int, length: int, dtype: str, op: ReduceOp, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    arrays = [values(length, dtype, seed) for seed in range(size)]

    def on_rank(transport: LocalTransport) -> Array:
        array: Array = arrays[transport.rank].copy()
        binomial_reduce(transport, array, root, numpy_combine(op))
        return array

    np.testing.assert_array_equal(LocalFabric(size).run(on_rank, TIMEOUT)[root], reduced(arrays, op), strict=True)


# The collectives that are made of the algorithms


@given(size=st.integers(1, 12), length=st.integers(0, 40), dtype=dtypes, data=st.data())
@few
def test_broadcast(size: int, length: int, dtype: str, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))

    def on_rank(transport: LocalTransport) -> Array:
        array = values(length, dtype, transport.rank)
        PointToPointCollectives(transport).broadcast(array, root)
        return array

    for result in LocalFabric(size).run(on_rank, TIMEOUT):
        np.testing.assert_array_equal(result, values(length, dtype, root), strict=True)


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=10), dtype=dtypes)
@few
def test_allgather(counts: list[int], dtype: str) -> None:
    arrays = [values(count, dtype, rank) for rank, count in enumerate(counts)]

    def on_rank(transport: LocalTransport) -> Array:
        out = np.zeros(sum(counts), dtype)
        PointToPointCollectives(transport).allgather(arrays[transport.rank], out, counts)
        return out

    for result in LocalFabric(len(counts)).run(on_rank, TIMEOUT):
        np.testing.assert_array_equal(result, np.concatenate(arrays), strict=True)


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=10), dtype=dtypes, op=ops)
@few
def test_reduce_scatter(counts: list[int], dtype: str, op: ReduceOp) -> None:
    arrays = [values(sum(counts), dtype, rank) for rank in range(len(counts))]

    def on_rank(transport: LocalTransport) -> Array:
        out = np.zeros(counts[transport.rank], dtype)
        PointToPointCollectives(transport).reduce_scatter(arrays[transport.rank], out, counts, op)
        return out

    results = LocalFabric(len(counts)).run(on_rank, TIMEOUT)
    np.testing.assert_array_equal(np.concatenate(results), reduced(arrays, op), strict=True)
    for rank, array in enumerate(arrays):
        np.testing.assert_array_equal(array, values(sum(counts), dtype, rank), "the input is only read")


@given(size=st.integers(1, 8), dtype=dtypes, data=st.data())
@few
def test_alltoall(size: int, dtype: str, data: st.DataObject) -> None:
    counts = data.draw(
        st.lists(st.lists(st.integers(0, 5), min_size=size, max_size=size), min_size=size, max_size=size)
    )
    parts = [
        [values(count, dtype, 100 * source + dest) for dest, count in enumerate(row)]
        for source, row in enumerate(counts)
    ]

    def on_rank(transport: LocalTransport) -> Array:
        recv_counts = [row[transport.rank] for row in counts]
        out = np.zeros(sum(recv_counts), dtype)
        mine = np.concatenate(parts[transport.rank])
        PointToPointCollectives(transport).alltoall(mine, counts[transport.rank], out, recv_counts)
        return out

    for rank, result in enumerate(LocalFabric(size).run(on_rank, TIMEOUT)):
        np.testing.assert_array_equal(result, np.concatenate([row[rank] for row in parts]), strict=True)


@pytest.mark.parametrize("size", range(1, 10))
def test_barrier_waits_for_everybody(size: int) -> None:
    arrived: list[int] = []

    def on_rank(transport: LocalTransport) -> None:
        collectives = PointToPointCollectives(transport)
        for turn in range(1, 6):
            arrived.append(transport.rank)
            collectives.barrier()
            assert len(arrived) >= turn * size
            collectives.barrier()

    LocalFabric(size).run(on_rank, TIMEOUT)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("nbytes", [0, LATENCY_BYTES, 2 * LATENCY_BYTES, 16 * LATENCY_BYTES])
def test_automatic_algorithm(size: int, nbytes: int) -> None:
    def on_rank(transport: LocalTransport) -> Array:
        collectives: Collectives = PointToPointCollectives(transport)
        data = np.full(nbytes // 8, transport.rank + 1.0)
        collectives.allreduce(data, ReduceOp.SUM)
        return data

    for result in LocalFabric(size).run(on_rank, TIMEOUT):
        np.testing.assert_array_equal(result, np.full(nbytes // 8, size * (size + 1) / 2))


def test_duplicate_collectives_do_not_mix() -> None:
    def on_rank(transport: LocalTransport) -> None:
        first = PointToPointCollectives(transport)
        second = first.duplicate()
        assert (second.rank, second.size) == (first.rank, first.size)
        a, b = np.full(1, float(transport.rank)), np.full(1, 10.0 * transport.rank)
        # Rank 0 takes them in the other order: it receives from `second` what was sent last.
        if transport.rank == 0:
            second.transport.recv(b, 1)
            first.transport.recv(a, 1)
            assert (a[0], b[0]) == (1.0, 10.0)
        else:
            first.transport.send(a, 0)
            second.transport.send(b, 0)
        second.close()
        first.barrier()

    LocalFabric(2).run(on_rank, TIMEOUT)


def test_bad_arguments_are_named() -> None:
    collectives = PointToPointCollectives(LocalFabric(2).transports[0])
    two, four = np.zeros(2), np.zeros(4)
    with pytest.raises(ArgumentError, match="no MPI under this transport"):
        collectives.allreduce(two, ReduceOp.SUM, "mpi")
    with pytest.raises(ArgumentError, match=r"'star'.*ring, tree, butterfly, rabenseifner, parameter_server"):
        collectives.allreduce(two, ReduceOp.SUM, "star")
    for root in (-1, 2):
        with pytest.raises(ArgumentError, match=f"from 0 to 1, not {root}"):
            collectives.broadcast(two, root)
    for wrong in (
        partial(collectives.allgather, two, four, [2, 3]),
        partial(collectives.allgather, two, four, [4]),
        partial(collectives.allgather, two, four, [1, 3]),
        partial(collectives.reduce_scatter, four, two, [2, 3], ReduceOp.SUM),
        partial(collectives.reduce_scatter, four, two, [1, 3], ReduceOp.SUM),
        partial(collectives.alltoall, four, [2, 3], four.copy(), [2, 2]),
        partial(collectives.alltoall, four, [2, 2], four.copy(), [2, 1]),
    ):
        with pytest.raises(ArgumentError, match="counts"):
            wrong()
