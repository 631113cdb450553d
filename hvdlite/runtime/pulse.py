"""Tells the launcher once a second what this rank does, for people who look at the job while it runs."""

from __future__ import annotations

import os
import resource
import threading
from typing import Any

from hvdlite.launcher_link.line import Line
from hvdlite.launcher_link.link import Address
from hvdlite.timeline import Counts
from hvdlite.watchdog.watchdog import Watchdog

_SECONDS = 1.0
_LONG_SECONDS = 1.0
"""A wait that lasts longer is named."""
_LONGEST_NAME = 200
_PATIENCE_SECONDS = 0.5


class Pulse:
    """A thread of one rank that sends a small message once a second.

    Args:
        control: The setting ``control``.
        rank: The number by which the launcher knows this rank.
        counts: What this rank has done.
        watch: Knows what this rank waits for.
    """

    def __init__(self, control: str, rank: int, counts: Counts, watch: Watchdog) -> None:
        self._control, self._rank, self._counts, self._watch = control, rank, counts, watch
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlite-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send the last message, and end the thread, unless the launcher takes no messages."""
        self._end.set()
        self._thread.join(_PATIENCE_SECONDS)

    def _run(self) -> None:
        try:
            line = Line(Address.parse(self._control))
        except (OSError, ValueError):  # without a launcher that listens, nobody looks
            return
        ends = False
        while not ends:
            ends = self._end.wait(_SECONDS)
            line.tell("pulse", **self.read())
        line.close()

    def read(self) -> dict[str, Any]:
        """Return the fields of the message."""
        counts = self._counts
        now, since = counts.clock(), counts.waiting_since
        what, lasts = self._watch.longest_wait(_LONG_SECONDS)
        return {
            "rank": self._rank,
            "time": now / 1e9,
            "step": counts.steps,
            "stepped": counts.stepped / 1e9,
            "waited": (counts.waited + (now - since if since else 0)) / 1e9,
            "exchanged": counts.exchanged / 1e9,
            "bytes": counts.nbytes,
            "memory": _resident_bytes(),
            "what": what[:_LONGEST_NAME],
            "lasts": lasts,
        }


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the most so far, which macOS gives in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
