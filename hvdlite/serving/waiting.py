"""How long the oldest request of a batch waits for others: the contract between the batcher and what chooses this time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Protocol

from hvdlite.errors import ArgumentError


class WaitChooser(Protocol):
    """Chooses how long the oldest request waits for its batch to fill. The batcher tells it what it sees.

    All times are in seconds. One thread makes all calls, and they return at once: an implementation that needs longer to choose
    does it elsewhere.
    """

    @property
    def wait_seconds(self) -> float:
        """The longest time from the arrival of the oldest request until its batch goes, 0 or more. It may be infinite."""

    @property
    def explanation(self) -> str:
        """What was chosen and why: one or several lines for a person."""

    @property
    def figures(self) -> Mapping[str, float]:
        """What it was chosen from, by the names of `hvdlite.serving.metrics.CHOICE`; empty if nothing was chosen."""

    def wait(self, now: float, here: int) -> float:
        """Return how long the oldest request waits while a replica idles: `wait_seconds`, or 0 if waiting cannot pay.

        Args:
            now: The time, on the clock of `arrived`.
            here: The number of requests that are here and not answered.
        """

    def arrived(self, time: float, here: int, key: Hashable) -> None:
        """Learn that a request has arrived, and was put into the queue.

        Args:
            time: When, on a clock that only goes forward. Calls come in order of time.
            here: The number of requests that are here and not answered, with this one.
            key: Requests of equal keys may share a batch.
        """

    def served(self, time: float, batch_size: int, seconds: float) -> None:
        """Learn that a replica has answered a batch. Batches that failed, and parts of a batch that failed, are not reported.

        Args:
            time: When its outputs were here, on the clock of `arrived`.
            batch_size: The number of requests in it, from 1 on.
            seconds: The service time, from when the batch was given to an idle replica until its outputs were here.
        """


class FixedWait:
    """A time that the user has chosen.

    Args:
        seconds: The longest wait of the oldest request, in seconds. 0 sends what is there as soon as a replica is idle.

    Raises:
        ArgumentError: The time is negative, or no number.
    """

    def __init__(self, seconds: float) -> None:
        if math.isnan(seconds) or seconds < 0:
            raise ArgumentError(f"max_wait={seconds!r} seconds: expected 0 or more.")
        self.wait_seconds = seconds
        self.figures: Mapping[str, float] = {}
        self.explanation = f"The oldest request waits up to {seconds * 1000:g} ms for others: this time was given."

    def wait(self, now: float, here: int) -> float:
        """Return `wait_seconds`."""
        return self.wait_seconds

    def arrived(self, time: float, here: int, key: Hashable) -> None:
        """Do nothing: the time is fixed."""

    def served(self, time: float, batch_size: int, seconds: float) -> None:
        """Do nothing: the time is fixed."""
