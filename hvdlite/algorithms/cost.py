"""The time that an allreduce takes, in the α-β-γ model, and the bytes that it sends.

A message of n bytes occupies its sender for nβ seconds, and its receiver for nβ seconds that begin α
seconds after the sender's. A rank sends one message at a time and receives one at a time, but can do both
at once. To reduce n bytes takes nγ seconds. The formulas give the time at which the last rank is done if all
start at time 0. They are exact on the simulated network of `hvdlite.comm.local`, which follows the same rules.

Source of the model: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations
in MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from hvdlite.algorithms.fold import Core
from hvdlite.errors import ArgumentError


def predict(name: str, ranks: int, nbytes: float, alpha: float, beta: float, gamma: float) -> float:
    """Return the time in seconds that allreduce algorithm `name` takes.

    The time is exact for any number of ranks, if the vector can be cut into equal slices: into as many as
    there are ranks for the ring, and into the largest power of two up to that for Rabenseifner's algorithm.
    Otherwise the real time differs by less than the cost of one element for each of the at most 2(P-1) slices
    that a rank sends.

    Args:
        name: An algorithm, one of `hvdlite.algorithms.ALGORITHMS`.
        ranks: The number of ranks, at least 1.
        nbytes: The size of the vector in bytes.
        alpha: The latency of a message in seconds.
        beta: The time to send a byte in seconds, 1 / bandwidth.
        gamma: The time to reduce a byte in seconds.

    Raises:
        ArgumentError: There is no such algorithm, or `ranks` is not positive.
    """
    _check(name, ranks)
    return _COSTS[name](ranks, _Vector(alpha, nbytes * beta, nbytes * gamma)) if ranks > 1 else 0.0


def sent(name: str, ranks: int, nbytes: float) -> float:
    """Return how many bytes all ranks together send in allreduce algorithm `name`.

    Every rank but one must give away what it has, and get the result. So 2(P-1)n bytes are the least, and only the butterfly
    sends more: n in each of its steps, on each rank of its core. The number is exact for any length.

    Args:
        name, ranks, nbytes: See `predict`.

    Raises:
        ArgumentError: See `predict`.
    """
    _check(name, ranks)
    if name == "butterfly":
        core = Core(ranks)
        return (core.size * _lg(core.size) + 2 * core.extra) * nbytes
    return 2 * (ranks - 1) * nbytes


def _check(name: str, ranks: int) -> None:
    if name not in _COSTS:
        raise ArgumentError(f"No cost is known of algorithm {name!r}; choose one of {', '.join(_COSTS)}.")
    if ranks < 1:
        raise ArgumentError(f"The number of ranks must be at least 1, not {ranks}.")


class _Vector(NamedTuple):
    """The time in seconds to send and reduce the whole vector once."""

    latency: float
    """α"""
    transfer: float
    """nβ"""
    reduction: float
    """nγ"""


def _ring(ranks: int, vector: _Vector) -> float:
    share = (ranks - 1) / ranks
    return 2 * (ranks - 1) * vector.latency + share * (2 * vector.transfer + vector.reduction)


def _parameter_server(ranks: int, vector: _Vector) -> float:
    return 2 * vector.latency + (ranks - 1) * (2 * vector.transfer + vector.reduction)


def _tree(ranks: int, vector: _Vector) -> float:
    return _binomial_reduce(ranks, vector) + _binomial_broadcast(ranks, vector)


def _binomial_reduce(ranks: int, vector: _Vector) -> float:
    """Return the time of a binomial reduce: lg P (α + nβ + nγ), or less where the last subtree is smaller than the others."""
    if ranks == 1:
        return 0.0
    near = 1 << ((ranks - 1).bit_length() - 1)
    own, last = _binomial_reduce(near, vector), _binomial_reduce(ranks - near, vector)
    return max(own, last + vector.latency) + vector.transfer + vector.reduction


def _binomial_broadcast(ranks: int, vector: _Vector) -> float:
    """Return the time of a binomial broadcast: lg P (α + nβ), or less where the first subtree is smaller than the others."""
    if ranks == 1:
        return 0.0
    near = 1 << ((ranks - 1).bit_length() - 1)
    own, first = _binomial_broadcast(near, vector), _binomial_broadcast(ranks - near, vector)
    return vector.transfer + max(own, vector.latency + first)


def _butterfly(ranks: int, vector: _Vector) -> float:
    def steps(core: Core, clocks: list[float]) -> list[float]:
        for step in range(_lg(core.size)):
            clocks = _exchange(clocks, 1 << step, vector.latency, vector.transfer, vector.reduction)
        return clocks

    return _folded(ranks, vector, steps)


def _rabenseifner(ranks: int, vector: _Vector) -> float:
    def steps(core: Core, clocks: list[float]) -> list[float]:
        halvings = range(_lg(core.size))
        for step in halvings:
            share = 0.5 ** (step + 1)
            clocks = _exchange(clocks, 1 << step, vector.latency, share * vector.transfer, share * vector.reduction)
        for step in reversed(halvings):
            clocks = _exchange(clocks, 1 << step, vector.latency, 0.5 ** (step + 1) * vector.transfer, 0.0)
        return clocks

    return _folded(ranks, vector, steps)


def _lg(size: int) -> int:
    """Return the binary logarithm of a power of two."""
    return size.bit_length() - 1


def _exchange(clocks: list[float], distance: int, latency: float, transfer: float, reduction: float) -> list[float]:
    """Return the clocks after each rank of the core has exchanged data with the rank at `distance`."""
    return [max(clock, clocks[index ^ distance] + latency) + transfer + reduction for index, clock in enumerate(clocks)]


def _folded(ranks: int, vector: _Vector, steps: Callable[[Core, list[float]], list[float]]) -> float:
    """Return the time to fold in, do `steps` in the core, and fold out.

    The core's ranks start at two different times if other ranks are folded into some of them. Then the
    latency of a message from an early rank to a late one is hidden, and the whole takes a little less time
    than the sum of its parts. So the clock of each rank is computed.
    """
    core = Core(ranks)
    begin = vector.latency + vector.transfer + vector.reduction
    clocks = steps(core, [begin if index < core.extra else 0.0 for index in range(core.size)])
    end = max(clocks)
    if core.extra:
        end = max(end, max(clocks[: core.extra]) + vector.latency + vector.transfer)
    return end


_COSTS: Mapping[str, Callable[[int, _Vector], float]] = MappingProxyType(
    {
        "ring": _ring,
        "tree": _tree,
        "butterfly": _butterfly,
        "rabenseifner": _rabenseifner,
        "parameter_server": _parameter_server,
    }
)
