"""Divides the time of a training step into computing, waiting for other ranks, and exchange.

At every moment the program either computes or waits for an exchange. While the program waits, either data is being moved
(exchange), or another rank is not ready (waiting)::

    program    ──── computes ────┤ waits                 ├── computes ──
    exchange       ├─ hidden ─┤          ├── exchange ───┤
    counts as      computing     waiting     exchange        computing
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

Interval = tuple[float, float]
"""The begin and the end of an interval, in microseconds."""


class Step(NamedTuple):
    """One step of one rank, in microseconds. Computing, waiting and exchange add up to ``end - begin``."""

    begin: float
    end: float
    computing: float
    waiting: float
    exchange: float


def divide(bounds: Sequence[float], waits: Iterable[Interval], exchanges: Iterable[Interval]) -> list[Step]:
    """Return the steps between `bounds`. All times are in microseconds.

    Args:
        bounds: The times at which a step ends and the next one begins, ascending.
        waits: The intervals in which the program waited. They may overlap, for a program may have several threads.
        exchanges: The intervals in which any thread moved data. They may overlap.
    """
    waiting = union(waits)
    exchanging = _common(waiting, union(exchanges))
    steps = []
    for begin, end in pairwise(bounds):
        stopped, moved = _length_within(waiting, begin, end), _length_within(exchanging, begin, end)
        steps.append(Step(begin, end, end - begin - stopped, stopped - moved, moved))
    return steps


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals: ascending intervals that do not touch each other."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def _common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two sets of intervals. Each set is ascending and without overlaps."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length_within(intervals: Sequence[Interval], begin: float, end: float) -> float:
    """Return how much of [begin, end] the intervals cover. The intervals are ascending and without overlaps."""
    index = max(0, bisect_left(intervals, (begin, begin)) - 1)
    total = 0.0
    while index < len(intervals) and intervals[index][0] < end:
        total += max(0.0, min(end, intervals[index][1]) - max(begin, intervals[index][0]))
        index += 1
    return total
