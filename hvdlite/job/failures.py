"""Which rank failed first, what to say about it, and the exit code that follows."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

_CONSEQUENCES = {"PeerLeftError"}


@dataclass(frozen=True)
class Failure:
    """One reason to end the job.

    Attributes:
        text: What happened, in full lines: a traceback, or a sentence.
        code: The exit code that the job gets for it.
        at: When it happened, in seconds since 1970; decides which of several came first.
        rank: Who failed; None for the job as a whole.
        host: Where that rank ran.
        consequence: Whether another failure may be behind it.
    """

    text: str
    code: int
    at: float
    rank: int | None = None
    host: str = ""
    consequence: bool = False

    def describe(self) -> str:
        """What is printed last on stderr."""
        if self.rank is None:
            return f"hvdliterun: {self.text.rstrip()}\n"
        where = f"rank {self.rank} on host {self.host}" if self.host else f"rank {self.rank}"
        return f"hvdliterun: {where} failed (exit code {self.code}):\n{self.text.rstrip()}\n"


def first(failures: Iterable[Failure]) -> Failure:
    """The failure that explains the others: the earliest, of those that are no mere consequence if any."""
    return min(failures, key=lambda failure: (failure.consequence, failure.at))


def is_consequence(error: str) -> bool:
    """Whether an exception of this class name tells of another rank's failure."""
    return error in _CONSEQUENCES


def exit_code(status: int) -> int:
    """A shell's exit code for a process's status (negative: the signal that killed it)."""
    return status if status >= 0 else 128 - status


def words(who: str, status: int, finished: bool) -> str:
    """One sentence for a process that ended without an explanation of its own.

    Args:
        who: Such as ``rank 1 (node7, pid 4711)``.
        status: As `exit_code` takes it.
        finished: Whether the program had come to its end before.
    """
    while_exiting = " while it was exiting, after its program had finished" if finished else ""
    if status < 0:
        return f"{who} was killed by {signal_name(-status)}{while_exiting}."
    if status == 0:
        return f"{who} ended without finishing: something called os._exit(0), or closed the process otherwise."
    return f"{who} ended with exit code {status}{while_exiting}."


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
