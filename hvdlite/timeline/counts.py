"""Counts what a rank has done, for people who look at the job while it runs. It keeps no events."""

from __future__ import annotations

import time


class Counts:
    """What one rank has done so far; all times are in nanoseconds. Another thread may read it at any time.

    Threads of a program that wait at the same moment may spoil a number: people look at it, and nothing depends on it.

    Attributes:
        steps: The training steps, each of which ends with an exchange of gradients.
        stepped: The time at which the last one ended; 0 before the first.
        waited: The time in which the program has waited for exchanges, without the present wait.
        waiting_since: The time at which the present wait began; 0 if the program computes.
        exchanged: The part of `waited` in which data was moved; in the rest other ranks were not ready.
        nbytes: The bytes of gradients and operations that this rank has given for exchange.
    """

    __slots__ = ("_ready", "exchanged", "nbytes", "stepped", "steps", "waited", "waiting_since")

    clock = staticmethod(time.perf_counter_ns)

    def __init__(self) -> None:
        self.steps = self.stepped = self.waited = self.waiting_since = self.exchanged = self.nbytes = self._ready = 0

    def step(self) -> None:
        """Count a step that ends."""
        self.steps += 1
        self.stepped = self.clock()

    def begin_wait(self) -> None:
        """Note that the program waits for an exchange."""
        self.waiting_since = self.clock()

    def end_wait(self) -> None:
        """Count the wait that `begin_wait` has noted."""
        since, self.waiting_since = self.waiting_since, 0
        self.waited += self.clock() - since if since else 0

    def ready(self) -> None:
        """Note that all ranks are ready for an exchange, in which data is moved now."""
        self._ready = self.clock()

    def done(self, nbytes: int = 0) -> None:
        """Count an exchange that ends. While the program computes, it loses no time by it."""
        self.nbytes += nbytes
        if since := self.waiting_since:
            self.exchanged += self.clock() - max(since, self._ready)
