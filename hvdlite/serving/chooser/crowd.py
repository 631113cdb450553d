"""Whether everybody who sends requests is waiting already, so that nobody is left to wait for."""

from __future__ import annotations

import math

PERIOD = 5.0  # seconds; what was seen counts for one to two of these
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between two tries


class Crowd:
    """Says whether waiting for more requests can pay.

    A few clients may send each request when their last one is answered. When all of them wait for an answer, a batch that waits
    for more waits in vain. So nothing waits while as many requests are here as have been here at the same time lately. With
    independent requests this is rarely so, and a new most is seen as soon as one comes while a batch is computed.

    If the load is so light that none comes then, the most would stay what it is. So now and then a batch waits in spite of it.
    If that is in vain, the next try comes after twice the time.
    """

    def __init__(self) -> None:
        self._most = self._most_before = 0
        self._period_ends = -math.inf
        self._try_ends: float | None = None
        self._next_try, self._pause = -math.inf, FIRST_PAUSE

    @property
    def most(self) -> int:
        """The most requests that were here at the same time lately."""
        return max(self._most, self._most_before)

    def arrived(self, time: float, here: int) -> None:
        """Learn that a request has arrived, as one of so many that are not answered."""
        self._advance(time)
        if here > self.most and self._try_ends is not None:
            self._end_try(time, FIRST_PAUSE)
        self._most = max(self._most, here)

    def wait(self, now: float, here: int, longest: float) -> float:
        """Return how long the oldest request waits: for the longest time in seconds, or not at all."""
        self._advance(now)
        if here < self.most or longest <= 0:
            return longest
        if self._try_ends is None and now >= self._next_try:
            self._try_ends = now + longest
        if self._try_ends is None:
            return 0.0
        if now < self._try_ends:
            return longest
        self._end_try(now, min(2 * self._pause, LONGEST_PAUSE))
        return 0.0

    def _end_try(self, now: float, pause: float) -> None:
        self._try_ends, self._pause, self._next_try = None, pause, now + pause

    def _advance(self, now: float) -> None:
        if now < self._period_ends:
            return
        self._most_before = self._most if now < self._period_ends + PERIOD else 0
        self._most, self._period_ends = 0, now + PERIOD
