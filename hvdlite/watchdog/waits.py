"""The record that the watchdog keeps of one wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdlite.errors import HvdliteError
from hvdlite.protocols import WaitKind
from hvdlite.ranks.topology import Members
from hvdlite.watchdog.deadlock import Need
from hvdlite.watchdog.letters import Letter
from hvdlite.watchdog.links import Link


@dataclass(slots=True)
class Wait:
    """One wait of this rank.

    Attributes:
        what: Returns a description of what this rank waits for.
        members: The ranks that must take part.
        fail: Ends the wait with an error. The watchdog's thread calls it.
        since: The time of `time.monotonic` at which the wait began.
        next_report: The time at which the wait is reported next.
    """

    what: Callable[[], str]
    members: Members
    fail: Callable[[HvdliteError], None]
    since: float = field(default_factory=lambda: time.monotonic())
    next_report: float = 0.0
    need: Callable[[], Need | None] | None = None
    """Returns what the other ranks must do; None if that is not known for certain."""
    thread: int = field(default_factory=threading.get_ident)
    link: Link | None = None
    """The link in which the rank waits, if its ranks may get out of step there."""
    kind: WaitKind = WaitKind.PEER
    one_of: tuple[int, ...] = ()
    """The world ranks of which any one can end the wait; empty if all of `members` must take part."""
    letter: Letter | None = None
    """The message for which the rank waits; None if it is none, or cannot be told from others."""
    limit: float | None = None
    """The longest time of the wait in seconds; None for the setting `stall_shutdown_time_seconds`."""
    failed: tuple[float, HvdliteError] | None = None
    """The time at which the wait was given up, and why. The wait may go on inside of a library that nothing interrupts."""

    def forgive(self, seconds: float) -> None:
        """Do not count a time in which the process was stopped, by Ctrl-Z or with its machine: nobody waited meanwhile."""
        self.since += seconds
        self.next_report += seconds


def of_program(waits: Mapping[int, Wait], main_thread: int) -> list[Wait]:
    """Return the waits that say where the program is.

    A server in a thread beside the program is idle, and says nothing: the program itself may be what other ranks wait for.
    """
    return [each for each in list(waits.values()) if each.kind is not WaitKind.SERVICE or each.thread == main_thread]
