"""Measures how far the clocks of the ranks are apart, and shares the short texts that start and stop a timeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hvdlite.protocols import Transport

Clock = Callable[[], int]
"""A monotonic clock: it returns nanoseconds since an arbitrary moment."""

ROUNDS = 32
"""How often a rank asks rank 0 for the time. The fastest answer counts, so a question that met a busy rank does no harm."""


class Offset(NamedTuple):
    """The difference between a rank's clock and rank 0's, with its error bound.

    Attributes:
        at: The time of the measurement on the rank's own clock, in nanoseconds.
        offset: The nanoseconds to add to the rank's clock to get rank 0's.
        error: The true offset differs from `offset` by at most this many nanoseconds.
    """

    at: int
    offset: int
    error: int


def measure(transport: Transport, clock: Clock) -> Offset:
    """Compare this rank's clock with rank 0's, by Cristian's algorithm. All ranks of `transport` call this together.

    A rank asks rank 0 for its time: it sends at t0, rank 0 answers with T, the answer arrives at t1. Rank 0 read its clock at
    some moment between the two, so the offset is T − (t0 + t1)/2, give or take (t1 − t0)/2. The question with the shortest
    round trip is the one that counts (F. Cristian, Probabilistic clock synchronization, Distributed Computing 3, 1989).

    Args:
        transport: The transport over all ranks. Nothing else may be sent on it meanwhile.
        clock: The clock of this rank.
    """
    stamp = np.zeros(1, np.int64)
    if transport.rank == 0:
        for other in range(1, transport.size):
            for _ in range(ROUNDS):
                transport.recv(stamp, other)
                stamp[0] = clock()
                transport.send(stamp, other)
        return Offset(clock(), 0, 0)
    answers = []
    for _ in range(ROUNDS):
        asked = clock()
        transport.send(stamp, 0)
        transport.recv(stamp, 0)
        heard = clock()
        middle = (asked + heard) // 2
        answers.append(Offset(middle, int(stamp[0]) - middle, (heard - asked + 1) // 2))
    return min(answers, key=lambda answer: answer.error)


def share_texts(transport: Transport, text: str) -> list[str]:
    """Give every rank the texts of all ranks, by way of rank 0. All ranks of `transport` call this together.

    Returns:
        The texts in the order of the ranks. The function returns only after every rank has called it.
    """
    if transport.size == 1:
        return [text]
    if transport.rank == 0:
        texts = [text, *(_receive(transport, other) for other in range(1, transport.size))]
        for other in range(1, transport.size):
            for each in texts:
                _send(transport, each, other)
        return texts
    _send(transport, text, 0)
    return [_receive(transport, 0) for _ in range(transport.size)]


def _send(transport: Transport, text: str, dest: int) -> None:
    data = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)
    transport.send(np.array([data.size], np.int64), dest)
    if data.size:
        transport.send(data, dest)


def _receive(transport: Transport, source: int) -> str:
    length = np.zeros(1, np.int64)
    transport.recv(length, source)
    data = np.empty(int(length[0]), np.uint8)
    if data.size:
        transport.recv(data, source)
    return data.tobytes().decode()
