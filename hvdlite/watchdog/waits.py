"""The watchdog's description of one wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hvdlite.errors import HvdliteError
from hvdlite.protocols import WaitKind
from hvdlite.topology import Members
from hvdlite.watchdog.deadlock import Need
from hvdlite.watchdog.links import Link


@dataclass(slots=True)
class Wait:
    """One wait of this rank.

    Attributes:
        what: A function that says in words what the rank waits for.
        members: The ranks that must take part.
        fail: A function that ends the wait with an error. The watchdog's thread calls it.
        since: The time at which the wait began, by `time.monotonic`, in seconds.
    """

    what: Callable[[], str]
    members: Members
    fail: Callable[[HvdliteError], None]
    since: float = field(default_factory=time.monotonic)
    next_report: float = 0.0
    need: Callable[[], Need | None] | None = None
    """A function that returns what the other ranks must do, or None if that is not certain. None if it is never known."""
    thread: int = field(default_factory=threading.get_ident)
    link: Link | None = None
    """The link on which the rank waits, if its ranks may get out of step; else None."""
    kind: WaitKind = WaitKind.PEER
    one_of: tuple[int, ...] = ()
    """World ranks of which any one can end the wait; empty if all of `members` must take part."""
    failed: tuple[float, HvdliteError] | None = None
    """The time and the error with which the wait was given up. It may last longer, inside a library that nothing interrupts."""

    def forgive(self, seconds: float) -> None:
        """Do not count `seconds` as waiting: the process was stopped for that time, by Ctrl-Z or with its machine."""
        self.since += seconds
        self.next_report += seconds
