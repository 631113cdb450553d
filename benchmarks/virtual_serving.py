"""Serves requests in virtual time: the real batcher, and replicas that take the time that a function says."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.serving.batcher import Batch, Batcher, Request
from hvdlite.serving.waiting import WaitChooser

SEND_AGAIN = 0.0005  # seconds


@dataclass(frozen=True)
class Served:
    """What came of it: when each request came, its latency, and how long replicas computed. Times in seconds."""

    arrived: np.ndarray
    latency: np.ndarray
    busy: float
    batches: int

    @property
    def p99(self) -> float:
        return float(np.quantile(self.latency, 0.99))

    @property
    def compute(self) -> float:
        """The seconds of a replica for each request."""
        return self.busy / len(self.latency)


def serve(
    arrivals: Iterable[float],
    service: Callable[[int], float],
    chooser: WaitChooser,
    max_batch: int,
    replicas: int = 1,
    every: tuple[float, Callable[[float], object]] = (math.inf, lambda now: None),
    until: float = 0.0,
    think: Callable[[], float] = lambda: SEND_AGAIN,
    key: Callable[[], Hashable] = lambda: "alike",
) -> Served:
    """Serve requests that arrive at these times, in rising order.

    Args:
        arrivals: The times in seconds.
        service: The service time of a batch, by its size; it may draw a new one for each call.
        chooser: Says how long the batcher waits.
        max_batch: The largest batch.
        replicas: The number of replicas.
        every: A period and what to do then, with the time as argument, for as long as requests come.
        until: Whoever is answered before this time sends another request.
        think: After how many seconds; it may draw a new number for each call.
        key: Returns the key of a request; those of equal keys may share a batch.
    """
    batcher = Batcher(max_batch, 1 << 30, chooser)
    for replica in range(replicas):
        batcher.joined(replica)
    numbers = itertools.count()
    events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
    requests: list[Request] = []
    latency: dict[int, float] = {}
    busy, batches = 0.0, 0
    now, alarm = 0.0, math.inf

    def at(time: float, what: Callable[..., None], *arguments: Any) -> None:
        if time < math.inf:
            heapq.heappush(events, (time, next(numbers), what, arguments))

    def arrive(request: Request) -> None:
        batcher.add(request)

    def answer(replica: int, batch: Batch) -> None:
        for over in batcher.done(replica, [None] * len(batch.requests), now):
            latency[over.request.payload] = now - over.request.arrived
            if now < until:
                come(now + think())

    def periodic() -> None:
        every[1](now)
        if now + every[0] <= max(requests[-1].arrived, until):
            at(now + every[0], periodic)

    def come(time: float) -> None:
        requests.append(Request(key(), time, math.inf, len(requests)))
        at(time, arrive, requests[-1])

    for time in arrivals:
        come(float(time))
    at(every[0], periodic)
    while events:
        now, _, what, arguments = heapq.heappop(events)
        what(*arguments)
        actions = batcher.step(now)
        for replica, batch in actions.send:
            seconds = service(len(batch.requests))
            busy, batches = busy + seconds, batches + 1
            at(now + seconds, answer, replica, batch)
        if actions.look_again < alarm or alarm <= now:
            alarm = actions.look_again
            at(alarm, lambda: None)
    assert len(latency) == len(requests), "requests were lost"
    arrived = np.array([request.arrived for request in requests])
    return Served(arrived, np.array([latency[number] for number in range(len(requests))]), busy, batches)
