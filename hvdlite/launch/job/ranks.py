"""The ranks of a job, as hvdliterun knows them: which ranks have said hello, and how far each is on its way to the end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdlite.launch.job.pulses import Pulses
from hvdlite.launcher_link.server import ControlConnection
from hvdlite.launcher_link.session import ProtocolError

STACK_SECONDS = 1.0
"""So long may a guard take to show where its program is."""
_AT_THE_END = r"watchdog.py\", line \d+ in leave$"  # `hvdlite.watchdog.watchdog.Watchdog.leave`


@dataclass
class Rank:
    """One rank whose guard has said hello.

    Attributes:
        number: The number of the rank.
        connection: The connection to the rank's guard.
        host: The name by which the rank's host knows itself.
        pid: The process id of the program.
        guard: The process id of the guard.
        local: The rank runs on this machine.
        finished: The program came to its end by itself.
        starts_mpi: The program has begun to start MPI, which waits for all ranks.
        used_mpi: Whether the program loaded MPI; None as long as the program has not said so.
        exited: The program's process has ended.
        gone: The connection to the guard has ended.
        reported: The program has said itself why it failed.
        asked: The guard got a signal to end the rank.
        lost: The rank has failed, and the job goes on without it.
        stopped_at: The time since which the rank is stopped, as of `time.monotonic`; None if it is not stopped.
        stop_signal: The signal that stopped the rank.
        stack_until: Until then the rank's guard may show where the stopped program is; None if it was not asked.
        stack: Where the program was when its guard was asked last; None if the guard has not shown it.
        askers: The connections that wait for the stack.
        pulses: What the rank says of itself once a second, if somebody looks at the job.
        unacknowledged: For each stream, the bytes that hvdliterun has received and not acknowledged to the guard yet.
    """

    number: int
    connection: ControlConnection
    host: str
    pid: int
    guard: int
    local: bool
    finished: bool = False
    starts_mpi: bool = False
    used_mpi: bool | None = None
    exited: bool = False
    gone: bool = False
    reported: bool = False
    asked: bool = False
    lost: bool = False
    stopped_at: float | None = None
    stop_signal: int = signal.SIGSTOP
    stack_until: float | None = None
    stack: str | None = None
    askers: list[ControlConnection] = field(default_factory=list)
    pulses: Pulses = field(default_factory=Pulses)
    unacknowledged: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"rank {self.number} ({self.host}, pid {self.pid})"

    def show(self, stopped: bool = False) -> None:
        """Ask the guard where the program is. `take_stack` gets the answer."""
        self.stack = None
        if self.gone or self.exited:
            self.take_stack("")
        else:
            self.connection.send("show", stopped=stopped)

    def take_stack(self, text: str) -> None:
        """Take the stack that the guard has shown, and tell who has asked."""
        self.stack = text
        while self.askers:
            self.askers.pop().send("stack", text=text)

    @property
    def waits_for_others(self) -> bool:
        """Whether the stack says that the program has come to its end, and waits until the others do."""
        return re.search(_AT_THE_END, self.stack or "", re.MULTILINE) is not None


class Ranks:
    """The ranks of one job, by number. A rank is here as soon as its guard has said hello.

    Args:
        size: The number of ranks that the job will have.
        stopped_seconds: A rank that is stopped for so long has failed.

    Attributes:
        present: The number of ranks that form the present group: fewer if the job has gone on without some.
    """

    def __init__(self, size: int, stopped_seconds: float = 10.0) -> None:
        self._stopped_seconds = stopped_seconds
        self._size = self.present = size
        self._known: dict[int, Rank] = {}
        self._grace: float | None = None

    def add(self, connection: ControlConnection, hello: dict[str, Any]) -> Rank:
        """Add the rank whose guard says hello over this connection. If the job is ending, tell the guard so.

        Raises:
            ProtocolError: The job has no such rank, or the rank is here already.
        """
        number = hello["rank"]
        if not 0 <= number < self._size or number in self._known or connection.rank is not None:
            raise ProtocolError(f"a hello of rank {number}, of {self._size}")
        connection.belongs_to(number)
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
        """Return the name of the host of a rank; empty if it is not known."""
        return self._known[number].host if number in self._known else ""

    @property
    def missing(self) -> list[int]:
        """The ranks that have not said hello yet."""
        return [] if len(self._known) == self._size else [n for n in range(self._size) if n not in self._known]

    def all_are(self, condition: Callable[[Rank], bool]) -> bool:
        """Tell whether `condition` holds for each rank that has said hello."""
        return all(map(condition, self))

    @property
    def are_finished(self) -> bool:
        """Whether the program of every rank that was not lost came to its end."""
        return not self.missing and self.all_are(lambda rank: rank.finished or rank.lost)

    @property
    def are_complete(self) -> bool:
        """Whether every rank's process has ended, and the programs of those that were not lost came to their ends."""
        return self.are_finished and self.all_are(lambda rank: rank.exited)

    @property
    def left(self) -> list[int]:
        """The numbers of the ranks that the job has not lost."""
        return [number for number in range(self._size) if number not in self._known or not self._known[number].lost]

    @property
    def have_lost(self) -> bool:
        """Whether the job has gone on without some ranks."""
        return any(rank.lost for rank in self)

    @property
    def may_have_lost_a_host(self) -> bool:
        """Whether another host has not answered for some seconds."""
        return any(not rank.local and not rank.gone and rank.connection.is_doubtful for rank in self)

    def lose(self, number: int) -> None:
        """Let the job go on without a rank that has failed.

        The guard of that rank ends what is left of it. From now on all guards stay until the end: MPI is not closed in order in
        such a job, and the MPI launcher would end all ranks as soon as one has left.
        """
        self._known[number].lost = True
        for rank in self:
            if not rank.gone:
                rank.connection.send("drop" if rank.number == number else "stay")

    def stopped(self, now: float, suspended: bool) -> list[Rank]:
        """Return the ranks that have been stopped (by SIGSTOP, for example) for too long, once their stacks are known.

        Args:
            now: The time, as of `time.monotonic`.
            suspended: hvdliterun was stopped too: somebody paused everything, so the time counts anew.
        """
        for rank in self:
            if rank.local and not rank.exited and not rank.gone and _is_stopped(rank.guard):
                rank.stopped_at = rank.stopped_at or now
            if rank.stopped_at is not None and suspended:
                rank.stopped_at = now
        found = [
            rank
            for rank in self
            if rank.stopped_at is not None and now - rank.stopped_at > self._stopped_seconds and not rank.lost
        ]
        for rank in found:
            if rank.stack_until is None:
                rank.stack_until = now + STACK_SECONDS
                rank.show(stopped=True)
        return [rank for rank in found if rank.stack is not None or rank.exited or now > (rank.stack_until or 0.0)]

    def check(self, number: int, size: int | None = None) -> None:
        """Raise ProtocolError if the job has no rank of this number, or not `size` ranks."""
        if not 0 <= number < self._size or size not in (None, self._size):
            raise ProtocolError(f"a message of rank {number}, of {self._size}")

    def check_group(self, number: int, size: int) -> None:
        """Raise ProtocolError unless a rank of this number is here, and `size` ranks form the present group."""
        if number not in self._known or size != self.present:
            raise ProtocolError(f"a message of rank {number} of {size}, in a job of {self.present}")

    def send_end(self, grace: float, exited: bool) -> None:
        """Tell guards to end their ranks, and to leave.

        Args:
            grace: Seconds between SIGTERM and SIGKILL.
            exited: If true, tell the guards whose program has ended; if false, tell the others.
        """
        self._grace = grace
        for rank in self:
            if not rank.gone and rank.exited is exited:
                rank.connection.send("end", grace=grace)

    def acknowledge(self, stream: str) -> None:
        """Tell guards that their ranks' stdout or stderr has been taken, so that they send more (see `guard._WINDOW`)."""
        for rank in self:
            if (taken := rank.unacknowledged.pop(stream, 0)) and not rank.gone:
                rank.connection.send("taken", stream=stream, bytes=taken)

    def kill_guards(self) -> None:
        """Kill the guards on this machine that have not left. Their ranks die with them."""
        for rank in self:
            if rank.local and not rank.gone:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(rank.guard, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
