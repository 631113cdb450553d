"""How the threads of a program wait for an operation: they drive the engine, spin a moment, then nap."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from hvdlite.negotiation.handle import Handle
from hvdlite.negotiation.messages import JOIN
from hvdlite.watchdog.threads import Threads
from hvdlite.watchdog.waits import Wait
from hvdlite.watchdog.watchdog import Watchdog

_SPINS = 200
"""Looks without a pause in between before a waiting caller begins to give its core away."""
_WATCH_AFTER = 0.05
"""Seconds in one wait before the watchdog is told; shorter waits cost nothing."""
LONGEST_NAP = 1e-3
FIRST_NAP = 50e-6


class Waiters:
    """The threads that use one engine, and which of them wait.

    Args:
        drive: Drives the engine a step, unless the operation is over. Returns whether anything moved.
        report_if_blocked: Is called while a wait lasts.
        watched: What the watchdog is to know of a wait for an operation that began at a time.
        watch: Is told of waits that last.
    """

    def __init__(
        self,
        drive: Callable[[Handle[Any]], bool],
        report_if_blocked: Callable[[], None],
        watched: Callable[[Handle[Any], float], Wait],
        watch: Watchdog,
    ) -> None:
        self._drive, self._report_if_blocked, self._watched, self._watch = drive, report_if_blocked, watched, watch
        self._submitters = Threads()
        self._since: dict[int, float] = {}  # by thread

    def add_submitter(self) -> None:
        """This thread uses the engine."""
        self._submitters.add()
        self._watch.users.add()

    def __bool__(self) -> bool:
        """Whether some thread waits."""
        return bool(self._since)

    def all_have_waited(self, seconds: float) -> bool:
        """Whether every thread that ever submitted has waited for so long, so that nothing more will be submitted."""
        before = time.monotonic() - seconds
        waiting = dict(self._since)
        if any(since > before for since in waiting.values()):
            return False
        return self._submitters.are_all_among(waiting)

    def wait(self, handle: Handle[Any]) -> None:
        """Return when the operation is over."""
        thread = threading.get_ident()
        interrupted = self._since.get(thread)  # by a signal handler, in which this is
        watched = None
        try:
            self._since[thread] = started = time.monotonic()
            spins = 0
            while True:
                moved = self._drive(handle)
                if handle.done:
                    break
                if moved:
                    spins = 0
                    self._since[thread] = time.monotonic()
                    if handle.key == JOIN:  # the others are at work: this wait has only begun
                        started = self._since[thread]
                        if watched is not None:
                            self._watch.end(watched)
                            watched = None
                spins += 1
                if spins > _SPINS:
                    self._report_if_blocked()
                    waited = time.monotonic() - started
                    time.sleep(min(LONGEST_NAP, max(FIRST_NAP, waited / 20)))
                    if watched is None and waited > _WATCH_AFTER:
                        watched = self._watch.begin(self._watched(handle, started))
                elif spins > 10:
                    os.sched_yield()
        finally:
            if interrupted is None:
                self._since.pop(thread, None)
            else:
                self._since[thread] = interrupted
            if watched is not None:
                self._watch.end(watched)


class Background:
    """A thread that drives an engine where nobody waits. It sleeps while there is nothing to do, and never spins.

    Args:
        is_idle: Whether nothing is in flight.
        drive: Drives the engine a step if nobody else does. Returns whether anything moved.
    """

    _GRACE = 200e-6
    """Seconds that the thread leaves to the submitter, who may submit more to be fused, or wait and drive by itself."""

    def __init__(self, is_idle: Callable[[], bool], drive: Callable[[], bool]) -> None:
        self._is_idle, self._drive = is_idle, drive
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._closed = False

    def wake(self) -> None:
        """There is something to drive."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvdlite-engine", daemon=True)
            self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        """Let the thread come to its end."""
        self._closed = True
        self._wake.set()

    def join(self) -> None:
        """Wait for its end."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        nap = FIRST_NAP
        while not self._closed:
            if self._is_idle():
                self._wake.wait()
                self._wake.clear()
                time.sleep(self._GRACE)
                continue
            nap = FIRST_NAP if self._drive() else min(2 * nap, LONGEST_NAP)
            time.sleep(nap)
