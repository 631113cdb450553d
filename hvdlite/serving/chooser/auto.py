"""`AutoWait` gives the wait that was chosen last, and `choosing` gives it a thread to choose in."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from array import array
from collections.abc import Callable, Hashable, Iterator, Mapping

import numpy as np

from hvdlite.serving.chooser.crowd import Crowd
from hvdlite.serving.chooser.model import Seen
from hvdlite.serving.chooser.objective import Choice

PERIOD = 1.0  # seconds
MOST_KEYS = 1 << 12
WORTH_A_LINE = 0.5, 1e-3  # in the log: a change of the wait by more than this part of it, and more than so many seconds

log = logging.getLogger(__name__)


class AutoWait:
    """A `WaitChooser` that finds the wait that is best at present.

    Args:
        update: Learns what has happened up to a time, and returns the choice for that time: `Model.update`, here or in another
            process (`ModelProcess`).

    Attributes:
        choice: What was chosen last, and from what; None until enough requests have come.
    """

    def __init__(self, update: Callable[[Seen, float], Choice | None]) -> None:
        self._update = update
        self._arrivals, self._batches = array("d"), array("d")
        self._lock = threading.Lock()
        self._numbers: dict[Hashable, int] = {}
        """A number for each key."""
        self._crowd = Crowd()
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

    def arrived(self, time: float, here: int, key: Hashable) -> None:
        """Learn that a request of a key has arrived, as one of so many that are not answered."""
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= MOST_KEYS:
                self._numbers.clear()  # the model may take some keys for others until it has forgotten the old numbers
            number = self._numbers[key] = len(self._numbers)
        with self._lock:
            self._arrivals.extend((time, here, number))
        self._crowd.arrived(time, here)

    def served(self, time: float, batch_size: int, seconds: float) -> None:
        """Learn that a batch was answered, and its service time."""
        with self._lock:
            self._batches.extend((time, batch_size, seconds))

    def _about_crowd(self) -> str:
        most = self._crowd.most
        return (
            f"Lately {most} request{'s were' if most != 1 else ' was'} here at the same time at most. A batch goes at once "
            "when as many are here, for nobody seems to be left to wait for."
        )

    def choose(self, now: float) -> None:
        """Choose again, from what has come up to a time on the clock of `arrived`. The other methods do not wait for it."""
        with self._lock:
            arrivals, self._arrivals = self._arrivals, array("d")
            batches, self._batches = self._batches, array("d")
        seen = Seen(np.array(arrivals).reshape(-1, 3), np.array(batches).reshape(-1, 3))
        choice = self._update(seen, now)
        if choice is not None:
            self.choice = choice


@contextlib.contextmanager
def choosing(
    chooser: AutoWait,
    clock: Callable[[], float] = time.monotonic,
    period: float = PERIOD,
    hang_up: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Let a thread choose again every so often, and log what it chooses if it differs much. The thread ends with the context.

    Args:
        chooser: What chooses.
        clock: The clock of `AutoWait.arrived`.
        period: The time between two choices, in seconds.
        hang_up: Ends the wait for another process that chooses.
    """
    over = threading.Event()

    def run() -> None:
        told: Choice | None = None
        while not over.wait(period):
            try:
                chooser.choose(clock())
            except Exception:
                if not over.is_set():
                    log.exception(
                        "The wait stays at %g ms, for choosing it again has failed", chooser.wait_seconds * 1e3
                    )
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
        hang_up()
        thread.join()


def _differs(choice: Choice, told: Choice) -> bool:
    part, seconds = WORTH_A_LINE
    return choice.meets != told.meets or abs(choice.wait - told.wait) > max(part * told.wait, seconds)
