"""What the watchdog knows of one wait."""

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
        what: What for, in words.
        members: The ranks that must take part.
        fail: Ends the wait with an error; called from the watch's thread.
        since: When it began (`time.monotonic`).
    """

    what: Callable[[], str]
    members: Members
    fail: Callable[[HvdliteError], None]
    since: float = field(default_factory=time.monotonic)
    next_report: float = 0.0
    need: Callable[[], Need | None] | None = None
    """Gives what the other ranks must do; None if that is not known for certain."""
    thread: int = field(default_factory=threading.get_ident)
    link: Link | None = None
    """Where it waits, if its ranks may get out of step there."""
    kind: WaitKind = WaitKind.PEER
    one_of: tuple[int, ...] = ()
    """World ranks of which any one can end the wait, if not all of `members` must take part."""
    failed: tuple[float, HvdliteError] | None = None
    """When and why it was given up. It may go on nevertheless, inside of a library that nothing interrupts."""

    def forgive(self, seconds: float) -> None:
        """The process was stopped for so long, by Ctrl-Z or with its machine: nobody has waited meanwhile."""
        self.since += seconds
        self.next_report += seconds
