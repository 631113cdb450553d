"""Measures the links between ranks, one pair at a time, while all other ranks sleep.

Rank 0 directs: a word of it wakes the two ranks of a pair, and their words come back. So it knows at each moment which pair is
measured, and a rank that waits for its turn takes no core from those that measure.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlite.protocols import Transport
from hvdlite.tools.advise.link import NetworkLink

MOST_RANKS = 16
"""Among so many ranks every pair is measured. Of more ranks, some are chosen (`chosen`)."""

_SMALL = 64
_ROUNDS, _REPEATS, _SLOW_REPEATS = 40, 5, 2
_FIRST_BYTES, _ENOUGH_BYTES, _LARGEST_BYTES = 2**16, 2**20, 2**24
_ENOUGH_SECONDS, _SLOW_SECONDS = 0.04, 0.4
"""A message of `_ENOUGH_BYTES` that takes the first time is long enough to measure the bandwidth; any that takes the second is.
On a busy machine, a short message may take as long because its rank had no core."""
_NAP = 1e-3

Pair = tuple[int, int]
"""A sender and a receiver."""


def chosen(nodes: Sequence[int], most: int = MOST_RANKS) -> list[int]:
    """Return the ranks between which links are measured: all of them, or a few of each host.

    Args:
        nodes: For each rank, a number of its host.
        most: How many ranks to choose at most.
    """
    if len(nodes) <= most:
        return list(range(len(nodes)))
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    in_turns = (rank for row in itertools.zip_longest(*members.values()) for rank in row if rank is not None)
    return sorted(itertools.islice(in_turns, most))


def measure_links(
    transport: Transport, ranks: Sequence[int], progress: Callable[[Pair, int, int], None] = lambda pair, done, of: None
) -> dict[Pair, NetworkLink]:
    """Measure the links between some ranks in both directions. All ranks of `transport` call this.

    Args:
        transport: The transport over all ranks. Nothing else may be sent on it meanwhile.
        ranks: The ranks to measure.
        progress: Is called on rank 0 before each pair is measured: the pair, how many were measured, and of how many.

    Returns:
        On rank 0, the link from the first to the second rank of each pair, for all pairs. Nothing on the others.
    """
    if transport.rank != 0:
        _obey(transport)
        return {}
    pairs = [(one, other) for one, other in itertools.combinations(sorted(ranks), 2)]
    found: dict[Pair, NetworkLink] = {}
    for done, (one, other) in enumerate(pairs):
        progress((one, other), done, len(pairs))
        answers = []
        for rank, peer in ((other, one), (one, other)):
            if rank != 0:
                transport.post(json.dumps({"peer": peer}).encode(), rank)
            else:
                answers.append(measure_pair(transport, peer))
        while len(answers) < 2:
            answers.append(_next(transport))
        for answer in answers:
            if answer is not None:
                found |= {(one, other): NetworkLink(*answer[0]), (other, one): NetworkLink(*answer[1])}
    for rank in range(1, transport.size):
        transport.post(json.dumps({"peer": None}).encode(), rank)
    return found


def _obey(transport: Transport) -> None:
    while True:
        peer = _next(transport)["peer"]
        if peer is None:
            return
        transport.post(json.dumps(measure_pair(transport, peer)).encode(), 0)


def _next(transport: Transport) -> Any:
    """Return the next word that somebody has sent, and sleep until it is there."""
    while (found := transport.poll()) is None:
        time.sleep(_NAP)
    return json.loads(found[1])


def measure_pair(transport: Transport, peer: int) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Measure the link to another rank, which calls this too.

    A message and an answer without data take 2α, and one with n bytes in one direction 2α + nβ. The fastest of some messages
    counts for β, because anything else that the hosts do makes a message slower.

    Returns:
        On the lower of both ranks, α and β from the lower rank to the other, and back. None on the other.
    """
    first = transport.rank < peer
    small = np.zeros(_SMALL, np.uint8)

    def send_and_hear(data: np.ndarray[Any, Any], answer: np.ndarray[Any, Any]) -> float:
        """Send some data there and receive an answer; the other rank does it the other way round."""
        began = time.perf_counter()
        if first:
            transport.send(data, peer)
            transport.recv(answer, peer)
        else:
            transport.recv(data, peer)
            transport.send(answer, peer)
        return time.perf_counter() - began

    send_and_hear(small, small)
    turns = [send_and_hear(small, small) for _ in range(_ROUNDS)]
    latency = statistics.median(turns) / 2
    one_way = []
    for forth in (True, False):
        nbytes, repeats = _FIRST_BYTES, _REPEATS
        while True:
            large = np.zeros(nbytes, np.uint8)
            took = min(send_and_hear(large, small) if forth else send_and_hear(small, large) for _ in range(repeats))
            again = np.array([took], np.float64)
            if first:
                transport.send(again, peer)
            else:
                transport.recv(again, peer)
            enough = _ENOUGH_SECONDS if nbytes >= _ENOUGH_BYTES else _SLOW_SECONDS
            if again[0] >= enough or nbytes >= _LARGEST_BYTES:
                break
            nbytes, repeats = 2 * nbytes, _REPEATS if again[0] < _ENOUGH_SECONDS else _SLOW_REPEATS
        one_way.append((latency, max(float(again[0]) - min(turns), 1e-9) / nbytes))
    return (one_way[0], one_way[1]) if first else None
