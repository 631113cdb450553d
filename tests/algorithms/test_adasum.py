"""The Adasum algorithm against its definition in float64, on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hvdlite as hvd
from hvdlite.algorithms.adasum import adasum
from hvdlite.algorithms.slices import slices
from hvdlite.comm.local import LocalFabric, LocalTransport
from hvdlite.protocols import Array
from hvdlite.testing import on_ranks
from tests.support.adasum_reference import adasum_of

TIMEOUT = 20.0
ROUNDING = {"f4": 3e-6, "f8": 1e-14}


def combined(vectors: Sequence[Array], counts: Sequence[int] | None = None) -> list[Array]:
    """Every rank's result."""

    def on_rank(transport: LocalTransport) -> Array:
        data: Array = vectors[transport.rank].copy()
        adasum(transport, data, [data.size] if counts is None else counts)
        return data

    return LocalFabric(len(vectors)).run(on_rank, TIMEOUT)


def assert_all(results: Sequence[Array], expected: Array, dtype: str) -> None:
    assert len({result.tobytes() for result in results}) == 1, "the ranks differ"
    assert results[0].dtype == dtype
    scale = float(np.abs(expected).max(initial=0.0)) or 1.0
    np.testing.assert_allclose(results[0], expected, rtol=0, atol=ROUNDING[dtype] * scale)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("length", [1, 2, 7, 1000, 70_001])
@pytest.mark.parametrize("size", range(1, 10))
def test_random_vectors(size: int, length: int, dtype: str) -> None:
    rng = np.random.default_rng([size, length])
    common = rng.normal(size=length)  # neither parallel nor orthogonal
    vectors = [(common + rng.normal(size=length)).astype(dtype) * 10.0**rank for rank in range(size)]
    assert_all(combined(vectors), adasum_of(vectors), dtype)


@pytest.mark.parametrize("size", range(2, 9))
def test_parallel_vectors_are_averaged(size: int) -> None:
    direction = np.random.default_rng(0).normal(size=100)
    same = [direction.copy() for _ in range(size)]
    assert_all(combined(same), direction, "f8")
    stretched = [direction * (rank + 1) for rank in range(size)]
    if size & (size - 1) == 0:
        assert_all(combined(stretched), direction * (size + 1) / 2, "f8")
    elif size == 3:  # the mean of a mean: ((1 + 2) / 2 + 3) / 2
        assert_all(combined(stretched), direction * 2.25, "f8")


@pytest.mark.parametrize("size", range(2, 9))
def test_orthogonal_vectors_are_added(size: int) -> None:
    basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(50, 50)))
    vectors = [basis[:, rank] * (rank + 1) for rank in range(size)]
    assert_all(combined(vectors), np.sum(vectors, axis=0), "f8")
    disjoint = [np.where(np.arange(50) % size == rank, rank + 1.0, 0.0).astype("f4") for rank in range(size)]
    for result in combined(disjoint):
        np.testing.assert_array_equal(result, np.sum(disjoint, axis=0))


@pytest.mark.parametrize("size", range(2, 9))
def test_zero_takes_no_part(size: int) -> None:
    vector = np.random.default_rng(0).normal(size=33).astype("f4")
    for owner in range(size):
        vectors = [vector if rank == owner else np.zeros_like(vector) for rank in range(size)]
        for result in combined(vectors):
            np.testing.assert_array_equal(result, vector)
    for result in combined([np.zeros(5)] * size):
        np.testing.assert_array_equal(result, np.zeros(5))


@pytest.mark.parametrize("size", range(2, 9))
def test_opposite_vectors_cancel(size: int) -> None:
    """With b = -a both factors are 3/2, and the result is 0; an odd rank's vector may be left over."""
    vector = np.arange(1.0, 20.0)
    vectors = [vector * (-1) ** rank for rank in range(size)]
    assert_all(combined(vectors), adasum_of(vectors), "f8")


@given(
    size=st.integers(1, 9),
    counts=st.lists(st.integers(0, 40), max_size=12),
    dtype=st.sampled_from(["f4", "f8"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_tensors_travel_together_and_are_combined_apart(size: int, counts: list[int], dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = [rng.integers(-3, 4, sum(counts)).astype(dtype) for _ in range(size)]
    expected = np.empty(sum(counts))
    for piece in slices(counts):
        expected[piece] = adasum_of([vector[piece] for vector in vectors])
    assert_all(combined(vectors, counts), expected, dtype)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_visible_and_in_its_tensor(bad: float) -> None:
    """Loss scaling looks for it."""

    def check() -> list[Array]:
        first, second = np.full(10, 1.0 + hvd.rank(), np.float32), np.full(4, 2.0, np.float32)
        if hvd.rank() == 1:
            first[3] = bad
        return hvd.allreduce([first, second], hvd.Adasum)

    for first, second in on_ranks(3, check):
        assert not np.isfinite(first).all()
        np.testing.assert_array_equal(second, np.full(4, 2.0, np.float32))


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_float32_is_not_squared_in_float32(size: int) -> None:
    for scale in (1e-30, 1e30):
        vectors = [np.full(9, scale, np.float32) for _ in range(size)]
        for result in combined(vectors):
            np.testing.assert_allclose(result, vectors[0], rtol=1e-6)


def spy(log: list[tuple[int, int]]) -> Callable[[LocalTransport], LocalTransport]:
    """A transport that logs the bytes of each exchange."""

    def wrap(transport: LocalTransport) -> LocalTransport:
        plain = transport.sendrecv

        def sendrecv(send: Array, dest: int, recv: Array, source: int) -> None:
            log.append((transport.rank, send.nbytes))
            plain(send, dest, recv, source)

        transport.sendrecv = sendrecv  # type: ignore[method-assign]
        return transport

    return wrap


@pytest.mark.parametrize("power", [1, 2, 3])
def test_cost_is_what_is_said(power: int) -> None:
    """P = 2ᵏ: 2k exchanges of data, 2(P-1)/P·n bytes in all, and k(k+1)/2 of dot products."""
    size, length, tensors = 2**power, 8 * 240, 4
    log: list[tuple[int, int]] = []
    wrap = spy(log)
    LocalFabric(size).run(
        lambda transport: adasum(wrap(transport), np.ones(length, np.float32), [length // tensors] * tensors), TIMEOUT
    )
    of_rank = [nbytes for rank, nbytes in log if rank == 0]
    dots = [nbytes for nbytes in of_rank if nbytes == 24 * tensors]
    data = [nbytes for nbytes in of_rank if nbytes != 24 * tensors]
    assert len(dots) == power * (power + 1) // 2
    assert len(data) == 2 * power
    assert sum(data) == 2 * (size - 1) * 4 * length // size
