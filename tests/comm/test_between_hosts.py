"""Sums of halves between hosts: rounded on each host and in the end, the same on all ranks, in half of the bytes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.comm.between_hosts import reduce_between_hosts
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.local import LocalFabric, LocalTransport
from hvdlite.comm.point_to_point import PointToPointCollectives
from hvdlite.protocols import ReduceOp
from hvdlite.tensors.reduction import reduction

KINDS = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def values_of(host: int, size: int) -> np.ndarray:
    """The sum of one host, in float32."""
    return np.random.default_rng([5, host]).standard_normal(size).astype(np.float32) * 100


def run(dtype: str, hosts: int, size: int) -> tuple[list[np.ndarray], float]:
    """Return the result on each host in float64, and the bytes that travelled."""
    fabric, how = LocalFabric(hosts), reduction(dtype, ReduceOp.SUM)

    def rank(transport: LocalTransport) -> np.ndarray:
        result = np.empty(size, how.storage)
        wide = values_of(transport.rank, size)
        reduce_between_hosts(
            PointToPointCollectives(transport), how, wide, result, lambda wide: np.divide(wide, 8, out=wide)
        )
        return result.view(KINDS[dtype]).astype(np.float64)

    return fabric.run(rank), sum(fabric.traffic(number).bytes for number in range(hosts))


@settings(max_examples=20)
@given(st.sampled_from(sorted(KINDS)), st.integers(1, 5), st.integers(1, 12_000))
def test_it_is_rounded_on_each_host_and_in_the_end(dtype: str, hosts: int, size: int) -> None:
    found, _ = run(dtype, hosts, size)
    parts = [values_of(host, size) / 8 for host in range(hosts)]
    if 4 * size >= 2**14:
        parts = [part.astype(KINDS[dtype]) for part in parts]
    truth = sum(part.astype(np.float64) for part in parts)
    epsilon = float(ml_dtypes.finfo(KINDS[dtype]).eps)
    np.testing.assert_allclose(found[0], truth, rtol=epsilon / 2 * 1.001, atol=1e-4)
    for other in found[1:]:
        assert np.array_equal(found[0], other)


@pytest.mark.parametrize("dtype", sorted(KINDS))
def test_half_of_the_bytes(dtype: str) -> None:
    size, hosts = 50_000, 4
    _, nbytes = run(dtype, hosts, size)
    assert nbytes == pytest.approx(2 * (hosts - 1) * 2 * size, rel=0.01)  # float32 takes twice as many


@pytest.mark.parametrize("dtype", sorted(KINDS))
@pytest.mark.parametrize("hosts", [[0, 0, 1, 1, 2], [0, 1, 2]])
def test_an_allreduce_sends_halves_between_hosts(dtype: str, hosts: list[int]) -> None:
    size, how = 50_000, reduction(dtype, ReduceOp.AVERAGE, size=len(hosts))
    given = [values_of(rank, size).astype(KINDS[dtype]) for rank in range(len(hosts))]

    def rank(transport: LocalTransport) -> np.ndarray:
        collectives = HierarchicalCollectives(transport.duplicate(), hosts, PointToPointCollectives)
        data = given[transport.rank].copy()
        collectives.allreduce(data.view(how.storage), how)
        collectives.close()
        return data

    fabric = LocalFabric(len(hosts), hosts=hosts)
    found = fabric.run(rank)
    parts = [
        sum(each.astype(np.float32) for each, host in zip(given, hosts, strict=True) if host == here) / len(hosts)
        for here in sorted(set(hosts))
    ]
    truth = sum(part.astype(KINDS[dtype]).astype(np.float64) for part in parts)
    epsilon = float(ml_dtypes.finfo(KINDS[dtype]).eps)
    np.testing.assert_allclose(found[0].astype(np.float64), truth, rtol=epsilon / 2 * 1.001, atol=1e-4)
    for other in found[1:]:
        assert np.array_equal(found[0].view(np.uint16), other.view(np.uint16))
    nbytes = sum(fabric.traffic(number).bytes for number in range(len(hosts)))
    assert nbytes == pytest.approx(2 * 2 * 2 * size, rel=0.02)  # 3 hosts: 2 (3 - 1) times 16 bits
