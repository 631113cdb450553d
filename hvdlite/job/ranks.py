"""The ranks of a job, as hvdliterun knows them: who said hello, who is where on its way to the end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdlite.job.server import Connection
from hvdlite.launcher_link.session import ProtocolError

_STOPPED_SECONDS = 1.5


@dataclass
class Rank:
    """One rank that said hello.

    Attributes:
        number: Which rank.
        connection: To its guard.
        host: Its host's own name.
        pid: The process id of the program.
        guard: The guard's process id.
        local: It runs on this machine.
        finished: The program came to its end by itself.
        used_mpi: Whether the program had anything to do with MPI; None if it could not say.
        exited: The program's process has ended.
        gone: The guard has left too.
        reported: It said itself why it failed.
        asked: Its guard was told by a signal to end it.
        stopped_at: Since when it is stopped, if it is.
        stop_signal: By which signal.
        unacknowledged: Bytes of each of its streams that its guard does not know yet to be taken.
    """

    number: int
    connection: Connection
    host: str
    pid: int
    guard: int
    local: bool
    finished: bool = False
    used_mpi: bool | None = None
    exited: bool = False
    gone: bool = False
    reported: bool = False
    asked: bool = False
    stopped_at: float | None = None
    stop_signal: int = signal.SIGSTOP
    unacknowledged: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"rank {self.number} ({self.host}, pid {self.pid})"


class Ranks:
    """All ranks of one job, by number; those that did not start yet are missing.

    Args:
        size: How many there will be.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: dict[int, Rank] = {}
        self._grace: float | None = None

    def add(self, connection: Connection, hello: dict[str, Any]) -> Rank:
        """Enter the rank that this connection's guard says hello for. Where the others were told to end, it is told too.

        Raises:
            ProtocolError: There is no such rank, or it is here already.
        """
        number = hello["rank"]
        if not 0 <= number < self._size or number in self._known or connection.rank is not None:
            raise ProtocolError(f"a hello of rank {number}, of {self._size}")
        connection.rank = number
        rank = Rank(number, connection, hello["host"], hello["pid"], hello["guard"], connection.is_local)
        self._known[rank.number] = rank
        if self._grace is not None:
            connection.send("end", grace=self._grace)
        return rank

    def __getitem__(self, number: int) -> Rank:
        return self._known[number]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._known.values())

    def host_of(self, number: int | None) -> str:
        """Where a rank runs; empty if that is not known."""
        return self._known[number].host if number in self._known else ""

    @property
    def missing(self) -> list[int]:
        """The ranks that did not say hello yet."""
        return [] if len(self._known) == self._size else [n for n in range(self._size) if n not in self._known]

    def all_are(self, condition: Callable[[Rank], bool]) -> bool:
        """Whether this holds for each rank that said hello."""
        return all(map(condition, self))

    @property
    def are_finished(self) -> bool:
        """Whether every rank's program came to its end."""
        return not self.missing and self.all_are(lambda rank: rank.finished)

    @property
    def are_complete(self) -> bool:
        """Whether every rank's program came to its end, and its process too."""
        return self.are_finished and self.all_are(lambda rank: rank.exited)

    def stopped(self, now: float, suspended: bool) -> list[Rank]:
        """The ranks that somebody stopped (SIGSTOP) and did not continue within a moment.

        Args:
            now: The time, as of `time.monotonic`.
            suspended: hvdliterun was stopped too: somebody paused everything, so count anew.
        """
        for rank in self:
            if rank.local and not rank.exited and not rank.gone and _is_stopped(rank.guard):
                rank.stopped_at = rank.stopped_at or now
            if rank.stopped_at is not None and suspended:
                rank.stopped_at = now
        return [rank for rank in self if rank.stopped_at is not None and now - rank.stopped_at > _STOPPED_SECONDS]

    def check(self, number: int) -> None:
        """Raise ProtocolError if there is no such rank in this job."""
        if not 0 <= number < self._size:
            raise ProtocolError(f"a message of rank {number}, of {self._size}")

    def send_end(self, grace: float, exited: bool) -> None:
        """Tell guards to end their ranks, and to leave.

        Args:
            grace: Seconds between TERM and KILL.
            exited: Tell those whose rank's process has ended, or those whose rank's has not.
        """
        self._grace = grace
        for rank in self:
            if not rank.gone and rank.exited is exited:
                rank.connection.send("end", grace=grace)

    def acknowledge(self, stream: str) -> None:
        """Let guards send more of their ranks' stdout or stderr: each waits when much of what it sent has not been taken."""
        for rank in self:
            if (taken := rank.unacknowledged.pop(stream, 0)) and not rank.gone:
                rank.connection.send("taken", stream=stream, bytes=taken)

    def kill_guards(self) -> None:
        """Kill this machine's guards that have not left; their ranks die with them."""
        for rank in self:
            if rank.local and not rank.gone:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(rank.guard, signal.SIGKILL)


class Departure:
    """How long ranks take to go whose programs have come to their ends. On a busy machine that may be long, and is no fault.

    Args:
        ranks: All of them.
        now: The time, as of `time.monotonic`.
        starved: Gives for how long a process of this machine has waited for a core, in all.
    """

    def __init__(self, ranks: Iterable[Rank], now: float, starved: Callable[[int], float] | None = None) -> None:
        self._starved = starved or _starved_seconds
        self._since = now
        self._before = {rank.number: self._starved(rank.pid) for rank in ranks if rank.local}

    def seconds(self, ranks: Iterable[Rank], now: float) -> float:
        """The time that each rank which is still there could have used: the least of them; since the beginning if none is."""
        had = [now - self._since]
        for rank in ranks:
            if rank.local and not rank.exited:
                had.append(now - self._since - (self._starved(rank.pid) - self._before.get(rank.number, 0.0)))
        return min(had)


def _starved_seconds(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # it has just ended; or this kernel does not count
        return 0.0


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
