"""The α-β-γ model against the clocks of the simulated network and the formulas of the literature."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvdlite.algorithms import ALGORITHMS
from hvdlite.algorithms.choose import LATENCY_BYTES, choose
from hvdlite.algorithms.cost import predict, sent
from hvdlite.algorithms.fold import Core
from hvdlite.comm.local import LocalTransport, Network
from hvdlite.errors import ArgumentError
from hvdlite.protocols import ReduceOp, numpy_combine
from tests.support.simulated import run_counting

NETWORKS = {
    "latency counts": Network(latency=1e-3, bandwidth=1e9, reduce_bandwidth=3e9),
    "bandwidth counts": Network(latency=1e-9, bandwidth=1e6, reduce_bandwidth=3e6),
    "both": Network(latency=1e-3, bandwidth=1e6, reduce_bandwidth=7e5),
}


def measure(algorithm: str, size: int, length: int, network: Network) -> tuple[float, int]:
    """The time on the simulated network of an allreduce of `length` float32, and the bytes that all ranks send."""

    def on_rank(transport: LocalTransport) -> None:
        data = np.zeros(length, np.float32)
        ALGORITHMS[algorithm](transport, data, transport.timed(numpy_combine(ReduceOp.SUM)))

    return run_counting(size, network, on_rank)


def predicted(algorithm: str, size: int, length: int, network: Network) -> float:
    """The same by the model."""
    return predict(algorithm, size, 4 * length, network.latency, 1 / network.bandwidth, 1 / network.reduce_bandwidth)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("size", [*range(1, 20), 31, 32])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_exact_for_equal_slices(algorithm: str, size: int, network: Network) -> None:
    # Any number of ranks, with a length that ranks and core divide: only rounding remains.
    length = math.lcm(size, Core(size).size)
    seconds, nbytes = measure(algorithm, size, length, network)
    assert seconds == pytest.approx(predicted(algorithm, size, length, network), rel=1e-12)
    assert nbytes == sent(algorithm, size, 4 * length)


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("length", [1, 5, 103])
@pytest.mark.parametrize("size", [3, 7, 8, 12])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_within_an_element_per_step_for_unequal_slices(
    algorithm: str, size: int, length: int, network: Network
) -> None:
    expected = predicted(algorithm, size, length, network)
    element = 4 * (1 / network.bandwidth + 1 / network.reduce_bandwidth)
    # Both send 2(P - 1) slices one after the other, each off by less than an element: too long on a path
    # of late ranks, or too short where the late ranks, those that others are folded into, keep short slices.
    slices = {"ring": 2 * (size - 1), "rabenseifner": 2 * (size - 1)}.get(algorithm, 0)
    seconds, nbytes = measure(algorithm, size, length, network)
    assert seconds == pytest.approx(expected, rel=1e-12, abs=slices * element)
    assert nbytes == sent(algorithm, size, 4 * length)


@pytest.mark.parametrize("size", [2, 4, 8, 64, 256])
def test_formulas_of_the_literature(size: int) -> None:
    a, b, c, n = 5e-6, 1e-9, 2e-10, 1e6
    lg = size.bit_length() - 1
    share = (size - 1) / size
    formulas = {
        "ring": 2 * (size - 1) * a + 2 * share * n * b + share * n * c,
        "tree": 2 * lg * (a + n * b) + lg * n * c,
        "butterfly": lg * (a + n * b + n * c),
        "rabenseifner": 2 * lg * a + 2 * share * n * b + share * n * c,
        "parameter_server": 2 * a + 2 * (size - 1) * n * b + (size - 1) * n * c,
    }
    assert formulas.keys() == ALGORITHMS.keys()
    for algorithm, formula in formulas.items():
        assert predict(algorithm, size, n, a, b, c) == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize("algorithm", ["butterfly", "rabenseifner"])
def test_folding_costs_at_most_two_more_steps(algorithm: str) -> None:
    a, b, c, n = 5e-6, 1e-9, 2e-10, 1e4
    for size in range(3, 200):
        core = Core(size)
        if core.extra:
            inner = predict(algorithm, core.size, n, a, b, c)
            fold = 2 * a + 2 * n * b + n * c
            # Up to one latency per step is hidden where early ranks wait for late ones.
            hidden = 2 * (core.size.bit_length() - 1) * a
            assert inner + fold - hidden <= predict(algorithm, size, n, a, b, c) <= (inner + fold) * (1 + 1e-12)


def test_choice_is_near_the_best() -> None:
    beta = 1e-9
    alpha = LATENCY_BYTES * beta
    # The server is left out: it takes two latencies for any number of ranks in a model that charges
    # nothing for the handling of a message.
    candidates = [name for name in ALGORITHMS if name != "parameter_server"]
    for gamma in (0.0, beta / 4, beta):
        for size in range(2, 70):
            for nbytes in (2**power for power in range(3, 31)):
                times = {name: predict(name, size, nbytes, alpha, beta, gamma) for name in candidates}
                assert times[choose(size, nbytes)] <= 1.35 * min(times.values())


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ArgumentError, match=r"'star'.*ring, tree"):
        predict("star", 4, 100, 1, 1, 1)
    with pytest.raises(ArgumentError, match="not 0"):
        predict("ring", 0, 100, 1, 1, 1)
