"""The ranks that have left the job, and what they have said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Departures:
    """The ranks that have left the job.

    Args:
        size: The number of ranks in the job.

    Attributes:
        left: For each rank that has left, the time of `time.monotonic` at which this rank has heard of it.
        farewells: For each of them, how it has left.
        are_complete: Set when all ranks have left.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.left: dict[int, float] = {}
        self.farewells: dict[int, str] = {}
        self.are_complete = threading.Event()

    def wait(self, is_alive: Callable[[], bool], seconds: float) -> list[int]:
        """Wait until all ranks have left. Return those that have not.

        Args:
            is_alive: Whether the thread still runs that hears of them. If not, there is nothing to wait for.
            seconds: The longest time.
        """
        end = time.monotonic() + seconds
        while not self.are_complete.wait(1.0) and is_alive() and time.monotonic() <= end:
            pass
        return [rank for rank in range(self._size) if rank not in self.left]

    def note(self, rank: int, farewell: str) -> None:
        """Note that a rank has left."""
        self.left[rank], self.farewells[rank] = time.monotonic(), farewell
        if len(self.left) == self._size:
            self.are_complete.set()
