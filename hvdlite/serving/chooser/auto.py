"""`AutoWait` chooses the wait while it serves, and `choosing` gives it a thread to choose in."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from hvdlite.errors import ArgumentError
from hvdlite.serving.chooser.arrivals import RecentArrivals
from hvdlite.serving.chooser.crowd import Crowd
from hvdlite.serving.chooser.objective import Choice, candidates, choose
from hvdlite.serving.chooser.queue import predict
from hvdlite.serving.chooser.service_time import ServiceTimes

PERIOD = 1.0  # seconds
LONGEST = 5.0  # seconds until it is chosen again though nothing has changed
PAUSE = 1e-4  # seconds
FEWEST_BATCHES = 4
WORTH_A_LINE = 0.5, 1e-3  # in the log: a change of the wait by more than this part of it, and more than so many seconds

log = logging.getLogger(__name__)


class AutoWait:
    """A `WaitChooser` that finds the wait that is best at present.

    With a bound of the 99th percentile of the latency, the best wait is the one that needs the least compute for each request.
    Without a bound, it is the one with the least mean latency. What happens with each wait is predicted by a simulation of the
    queue (`queue.predict`) with the service times and the arrivals of the last seconds. Requests come at their rate, whatever
    their latency is; or from a number of clients that wait for their answers, if it looks so (`clients.clients_of`).

    Args:
        max_batch: The largest batch.
        replicas: The number of replicas, 1 or more.
        slo_p99: The bound of the 99th percentile of the latency, in seconds; None for no bound.
        seed: Where the chance of the simulation begins.

    Attributes:
        choice: What was chosen last, and from what; None until enough requests have come.

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
        self._crowd = Crowd()
        self._lock = threading.Lock()
        self._chosen = 0.0
        self.choice: Choice | None = None

    @property
    def wait_seconds(self) -> float:
        """The wait that was chosen last, in seconds; 0 until enough requests have come."""
        choice = self.choice
        return 0.0 if choice is None else choice.wait

    @property
    def explanation(self) -> str:
        """What was chosen and why."""
        choice = self.choice
        if choice is None:
            return "No request waits for others yet: too few have come to choose."
        return f"{choice.explain()}\n{self._about_crowd()}"

    @property
    def figures(self) -> Mapping[str, float]:
        """What was chosen from; empty until something was chosen."""
        choice = self.choice
        return {} if choice is None else choice.figures()

    def wait(self, now: float, here: int) -> float:
        """Return the chosen wait, or 0 if everybody who sends is here already."""
        return self._crowd.wait(now, here, self.wait_seconds)

    def arrived(self, time: float, here: int) -> None:
        """Learn that a request has arrived, as one of so many that are not answered."""
        self._arrivals.add(time, here)
        self._crowd.arrived(time, here)

    def served(self, time: float, batch_size: int, seconds: float) -> None:
        """Learn that a batch was answered, and its service time."""
        self._arrivals.answered(time, batch_size)
        with self._lock:
            self._times.observe(batch_size, seconds)

    def _about_crowd(self) -> str:
        most = self._crowd.most
        return (
            f"Lately {most} request{'s were' if most != 1 else ' was'} here at the same time at most. A batch goes at once "
            "when as many are here, for nobody seems to be left to wait for."
        )

    def choose(self, now: float, pause: Callable[[], object] = lambda: None) -> None:
        """Choose again, from what has come up to a time. It takes about 30 ms of a core, or 2 ms if little has changed
        since the last choice, which then stays for up to 5 seconds. Calls of the other methods do not wait for it.

        Args:
            now: The time on the clock of `arrived`.
            pause: Called often, so that it can let other threads have Python's lock.
        """
        with self._lock:
            times = self._times.copy()
        service, arrivals = times.fit(), self._arrivals.window(now)
        if service is None or service.batches < FEWEST_BATCHES or arrivals is None:
            return
        choice = self.choice
        if choice is not None and now < self._chosen + LONGEST and choice.is_of(arrivals, service):
            return
        self._chosen = now
        waits = candidates(arrivals, service, self._slo_p99, self._max_batch)
        predictions = predict(arrivals, service, waits, self._max_batch, self._replicas, self._random, pause)
        self.choice = choose(predictions, self._slo_p99, arrivals, service, self._replicas)


@contextlib.contextmanager
def choosing(chooser: AutoWait, clock: Callable[[], float] = time.monotonic, period: float = PERIOD) -> Iterator[None]:
    """Let a thread choose again every so often, and log what it chooses if it differs much. The thread ends with the context.

    Args:
        chooser: What chooses.
        clock: The clock of `AutoWait.arrived`.
        period: The time between two choices, in seconds.
    """
    over = threading.Event()

    def run() -> None:
        told: Choice | None = None
        while not over.wait(period):
            try:
                chooser.choose(clock(), lambda: time.sleep(PAUSE))
            except Exception:
                log.exception("The wait stays at %g ms, for choosing it again has failed", chooser.wait_seconds * 1e3)
                continue
            choice = chooser.choice
            if choice is not None and (told is None or _differs(choice, told)):
                log.info("%s", choice.summary())
                told = choice

    thread = threading.Thread(target=run, name="hvdlite wait chooser", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _differs(choice: Choice, told: Choice) -> bool:
    part, seconds = WORTH_A_LINE
    return choice.meets != told.meets or abs(choice.wait - told.wait) > max(part * told.wait, seconds)
