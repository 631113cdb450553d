"""The waits of a program's threads for an operation: a thread drives the engine, spins for a moment, then naps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from hvdlite.operations.negotiation.handle import Handle
from hvdlite.operations.negotiation.messages import JOIN
from hvdlite.ranks.own_core import yield_core
from hvdlite.watchdog.threads import Threads
from hvdlite.watchdog.waits import Wait
from hvdlite.watchdog.watchdog import Watchdog

_SPINS = 200
"""How often a waiting thread looks without a pause before it begins to offer its core to others."""
_WATCH_AFTER = 0.05
"""The time in seconds after which a wait is registered with the watchdog. Shorter waits cost nothing."""
LONGEST_NAP = 1e-3
FIRST_NAP = 50e-6


class Waiters:
    """The threads that use one engine, and the threads of these that wait.

    Args:
        drive: A function that drives the engine one step unless the operation is over. It returns whether there was progress.
        report_if_blocked: A function that is called again and again during a wait.
        watched: A function that makes the watchdog's `Wait` from a handle and the time at which its wait began.
        watch: The watchdog, which owns waits that last.
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
        self._since: dict[int, float] = {}  # for each waiting thread the time at which its wait began

    def add_submitter(self) -> None:
        """Note that the calling thread uses the engine."""
        self._submitters.add()
        self._watch.users.add()

    def __bool__(self) -> bool:
        """Say whether any thread waits."""
        return bool(self._since)

    def all_have_waited(self, seconds: float) -> bool:
        """Say whether every thread that ever submitted has waited for `seconds`: then nothing more will be submitted."""
        before = time.monotonic() - seconds
        waiting = dict(self._since)
        if any(since > before for since in waiting.values()):
            return False
        return self._submitters.are_all_among(waiting)

    def wait(self, handle: Handle[Any]) -> None:
        """Return when the operation is over."""
        thread = threading.get_ident()
        interrupted = self._since.get(thread)  # not None: this runs in a signal handler, during another wait
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
                    if handle.key == JOIN:  # the other ranks made progress, so the wait counts from now
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
                    yield_core()
        finally:
            if interrupted is None:
                self._since.pop(thread, None)
            else:
                self._since[thread] = interrupted
            if watched is not None:
                self._watch.end(watched)
