"""`Model` chooses the wait from what was seen: the arrivals, the service times, and a simulation of the queue."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdlite.errors import ArgumentError
from hvdlite.serving.chooser.arrivals import RecentArrivals
from hvdlite.serving.chooser.objective import Choice, candidates, choose
from hvdlite.serving.chooser.queue import predict
from hvdlite.serving.chooser.service_time import ServiceTimes

LONGEST = 5.0  # seconds until it is chosen again though nothing has changed
FEWEST_BATCHES = 4


@dataclass(frozen=True)
class Seen:
    """What has happened since the last choice.

    Attributes:
        arrivals: For each request, when it came, how many were here and not answered, with it, and the number of its key: those
            of equal keys may share a batch. Shape (n, 3).
        batches: For each batch that was answered, when, its size, and its service time. Shape (m, 3). Times in seconds.
    """

    arrivals: npt.NDArray[np.float64]
    batches: npt.NDArray[np.float64]


class Model:
    """Chooses the best wait for the load of the last seconds.

    With a bound of the 99th percentile of the latency, the best wait is the one that needs the least compute for each request.
    Without a bound, it is the one with the least mean latency. What happens with each wait is predicted by a simulation of the
    queue (`queue.predict`) with the service times and the arrivals of the last seconds. Requests come at their rate, whatever
    their latency is; or from a number of clients that wait for their answers, if it looks so (`clients.clients_of`).

    Args:
        max_batch: The largest batch.
        replicas: The number of replicas, 1 or more.
        slo_p99: The bound of the 99th percentile of the latency, in seconds; None for no bound.
        seed: Where the chance of the simulation begins.

    Raises:
        ArgumentError: An argument is out of its range.
    """

    def __init__(self, max_batch: int, replicas: int = 1, slo_p99: float | None = None, seed: int = 0) -> None:
        if max_batch < 1 or replicas < 1:
            raise ArgumentError(f"max_batch={max_batch}, replicas={replicas}: expected 1 or more of each.")
        if slo_p99 is not None and not 0 < slo_p99 < np.inf:
            raise ArgumentError(f"slo_p99={slo_p99!r} seconds: expected a time above 0.")
        self._max_batch, self._replicas, self._slo_p99 = max_batch, replicas, slo_p99
        self._random = np.random.default_rng(seed)
        self._arrivals = RecentArrivals()
        self._times = ServiceTimes(max_batch)
        self._chosen = 0.0
        self._choice: Choice | None = None

    def update(self, seen: Seen, now: float) -> Choice | None:
        """Learn what has happened up to a time, and return the choice for now; None until enough requests have come.

        It takes about 30 ms of a core; or 2 ms if little has changed since the last choice, which then stays for up to 5 s.
        """
        self._arrivals.add(*seen.arrivals.T)
        self._arrivals.answered(*seen.batches.T[:2])
        for _, size, seconds in seen.batches.tolist():
            self._times.observe(int(size), seconds)
        service, arrivals = self._times.fit(), self._arrivals.window(now)
        if service is None or service.batches < FEWEST_BATCHES or arrivals is None:
            return self._choice
        choice = self._choice
        if choice is None or now >= self._chosen + LONGEST or not choice.is_of(arrivals, service):
            self._chosen = now
            waits = candidates(arrivals, service, self._slo_p99, self._max_batch)
            if choice is not None:
                waits = np.union1d(waits, choice.wait)
            predictions = predict(arrivals, service, waits, self._max_batch, self._replicas, self._random)
            present = None if choice is None else int(np.searchsorted(waits, choice.wait))
            self._choice = choose(predictions, self._slo_p99, arrivals, service, self._replicas, present)
        return self._choice
