"""Which requests of a failed batch make `predict` raise: parts of it are computed until each request is answered.

Half of a group that is known to have one that raises is computed. If it raises, it has one, and nothing is known of the other
half any more: this joins the rest. If it does not, its requests are answered, and the other half has one. When the search has
ended, the rest is computed as one part, which answers all of it unless it has another one. What is only known by inference to
raise is computed last, alone.

So if d requests raise whenever they are computed, of n in the batch, and one replica computes, at most d · (⌈log₂ n⌉ + 2) parts
are computed: each search takes ⌈log₂ n⌉, one part is the rest, and one the inferred request. For one of 32 these are 7 parts,
and all others are answered after 6 at the latest. After n parts, each request that is left is computed alone: no more than 2 n
parts are computed whatever raises. (A batch of fewer than four may take ⌈log₂ n⌉ + 2 parts before that.) A replica that has
nothing else to do computes the rest and other halves at the same time; these parts come on top.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Part(Generic[T]):
    """Requests of an isolation that are computed together.

    Args:
        isolation: Whose they are.
        requests: The requests.
        other: The other half, which has one that raises if these have none; empty if nothing is known of another half.
    """

    def __init__(self, isolation: Isolation[T], requests: list[T], other: Sequence[T] = ()) -> None:
        self.isolation, self.requests, self.other = isolation, requests, list(other)
        isolation.computing.append(self)

    def passed(self) -> None:
        """Learn that it was computed."""
        self.isolation.computing.remove(self)
        self.isolation.suspect(self.other, was_alone=False)

    def raised(self) -> None:
        """Learn that `predict` raised on it. If it is one request, this request is to blame."""
        self.isolation.computing.remove(self)
        self.isolation.rest += self.other
        self.isolation.suspect(self.requests, was_alone=len(self.requests) == 1)

    def lost(self) -> None:
        """Learn that nothing was learnt, and that others care for its requests."""
        self.isolation.computing.remove(self)
        self.isolation.rest += self.other


class Isolation(Generic[T]):
    """One failed batch.

    Args:
        requests: Its requests, two or more.
        waits: Says whether a request still waits to be computed: it may be too late, or nobody waits for it.

    Attributes:
        rest: Requests of which nothing is known.
        computing: Parts that are computed at present.
    """

    def __init__(self, requests: Sequence[T], waits: Callable[[T], bool]) -> None:
        self._waits = waits
        self._groups: deque[list[T]] = deque()
        """Each is known to have one that raises."""
        self._alone: deque[T] = deque()
        self.rest: list[T] = []
        self.computing: list[Part[T]] = []
        self._budget = max(len(requests), math.ceil(math.log2(max(len(requests), 2))) + 2)
        self.suspect(list(requests), was_alone=False)

    def suspect(self, group: list[T], was_alone: bool) -> None:
        """Learn that one of a group raises, at least. One that has raised alone is answered."""
        if len(group) > 1:
            self._groups.append(group)
        elif not was_alone:
            self._alone.extend(group)

    def take(self) -> Part[T] | None:
        """Return what is computed next; None if nothing is left, or all that is left is computed at present."""
        if self._budget <= 0:
            self._alone.extend(self.rest)
            self._alone.extend(request for group in self._groups for request in group)
            self.rest.clear()
            self._groups.clear()
        while self._groups:
            group = self._waiting(self._groups.popleft())
            half = (len(group) + 1) // 2
            if group[half:]:
                return self._paid(Part(self, group[:half], group[half:]))
            self._alone.extend(group)
        for others in (self.rest, *(part.other for part in self.computing)):
            found = self._waiting(others)
            others.clear()
            if found:
                return self._paid(Part(self, found))
            if others is self.rest and (alone := self._next_alone()):
                return self._paid(alone)
        return None

    def _next_alone(self) -> Part[T] | None:
        while self._alone:
            if self._waits(request := self._alone.popleft()):
                return Part(self, [request])
        return None

    def _paid(self, part: Part[T]) -> Part[T]:
        self._budget -= 1
        return part

    def _waiting(self, requests: Sequence[T]) -> list[T]:
        return [request for request in requests if self._waits(request)]
