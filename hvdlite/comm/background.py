"""A thread of this rank that does what nobody waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_FIRST_NAP, _LONGEST_NAP = 50e-6, 1e-3
"""The shortest and the longest nap of the thread while it sees no progress, in seconds."""


class Background:
    """A thread that drives something while nobody waits. It sleeps while there is nothing to do, and never spins.

    Args:
        is_idle: A function that says whether there is nothing to drive.
        drive: A function that drives one step if no other thread does. It returns whether there was progress.
        name: The name of the thread.
        doze_seconds: If not 0, the thread drives once in a millisecond. For so long after it had something to drive, it looks
            by itself, because to wake it costs the caller more.
    """

    _GRACE = 200e-6
    """The time in seconds for which the thread lets the submitter go first. The submitter may submit more operations, which can
    be fused, or it may wait and drive by itself."""

    def __init__(
        self, is_idle: Callable[[], bool], drive: Callable[[], bool], name: str, doze_seconds: float = 0.0
    ) -> None:
        self._is_idle, self._drive, self._name = is_idle, drive, name
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._doze_seconds = doze_seconds
        self._dozes = False
        self._closed = False

    def wake(self) -> None:
        """Wake the thread: there is something to drive."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        if not self._dozes:
            self._wake.set()

    def stop(self) -> None:
        """Tell the thread to end. This does not wait."""
        self._closed = True
        self._wake.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        first = _LONGEST_NAP if self._doze_seconds else _FIRST_NAP
        nap, until = first, 0.0
        while not self._closed:
            if self._is_idle():
                self._dozes = time.monotonic() < until
                if self._dozes:
                    time.sleep(_LONGEST_NAP)
                    continue
                if not self._is_idle():  # the caller may have seen it doze a moment ago
                    continue
                self._wake.wait()
                self._wake.clear()
                time.sleep(self._GRACE)
                continue
            if self._doze_seconds:
                until = time.monotonic() + self._doze_seconds
            nap = first if self._drive() else min(2 * nap, _LONGEST_NAP)
            time.sleep(nap)
