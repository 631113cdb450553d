"""A failure ends the job: this file finds the first failure, describes it, and gives the exit code that follows."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

_CONSEQUENCES = {"PeerLeftError", "CommunicationError", "NcclError"}
_OUTSIDE = {128 + number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)}


@dataclass(frozen=True)
class Failure:
    """One reason to end the job.

    Attributes:
        text: A description of the failure, in full lines: a traceback, or a sentence.
        code: The exit code that the job gets for this failure.
        at: The time of the failure, in seconds since 1970. It decides which of several failures came first.
        rank: The rank that failed; None if the job as a whole failed.
        host: The host of that rank; empty if unknown.
        consequence: Another failure may be the cause of this one.
        is_final: An elastic job does not go on after it either.
    """

    text: str
    code: int
    at: float
    rank: int | None = None
    host: str = ""
    consequence: bool = False
    is_final: bool = False

    def describe(self) -> str:
        """Return the text that hvdliterun prints last on stderr."""
        if self.rank is None:
            return f"hvdliterun: {self.text.rstrip()}\n"
        where = f"rank {self.rank} on host {self.host}" if self.host else f"rank {self.rank}"
        return f"hvdliterun: {where} failed (exit code {self.code}):\n{self.text.rstrip()}\n{_hint(self.text)}"


_STARTS_TORCH = re.compile(r"env:// rendezvous: environment variable \w+ expected, but not set$")
_NEEDS_TORCH = re.compile(r"Default process group has not been initialized")
_HUGGING_FACE = re.compile(r'^ *File ".*/(?:accelerate|transformers)/', re.MULTILINE)


def _hint(text: str) -> str:
    """Return what to do about a failure of torch.distributed in a program that was written for torchrun; empty for others."""
    last = text.rstrip().rpartition("\n")[2]
    if _STARTS_TORCH.search(last) and _HUGGING_FACE.search(text):
        return (
            "hvdliterun: Accelerate and transformers.Trainer need hvdlite_torch.accelerate.prepare() before the program makes "
            "an Accelerator or TrainingArguments (hvdlite docs model_parallel): hvdlite migrate PROGRAM shows where.\n"
        )
    if _STARTS_TORCH.search(last) or _NEEDS_TORCH.search(last):
        return (
            'hvdliterun: import hvdlite_torch, and call torch.distributed.init_process_group("hvdlite") before; or leave the '
            "wrapper DistributedDataParallel out and wrap the optimizer (hvdlite docs from_ddp). hvdlite migrate PROGRAM "
            "prints what to change.\n"
        )
    return ""


def first(failures: Iterable[Failure]) -> Failure:
    """Return the failure that explains the others.

    It is the earliest failure that is no consequence of another one. If all are consequences, it is the earliest of them.
    """
    return min(failures, key=lambda failure: (failure.consequence, failure.at))


def is_consequence(error: str) -> bool:
    """Tell whether an exception is the consequence of another rank's failure.

    Args:
        error: The name of its class, and of those from which it came, with blanks between them.
    """
    return not _CONSEQUENCES.isdisjoint(error.split())


def is_from_outside(failure: Failure) -> bool:
    """Tell whether somebody else has ended the rank, or the system: the program need not be at fault."""
    return failure.rank is not None and failure.code in _OUTSIDE


def cause(failure: Failure) -> str:
    """Return a text that is the same for failures that come in the same way from the same place."""
    places = re.findall(r'^ *File ".*", line \d+.*$', failure.text, re.MULTILINE)
    if places:
        return "\n".join([*places, failure.text.rstrip().rpartition("\n")[2].partition(":")[0]])
    return re.sub(r"\(.*?\)|\d+", "", failure.text)


def exit_code(status: int) -> int:
    """Return the exit code that a shell gives for the status of a process. A status of -N means that signal N killed it."""
    return status if status >= 0 else 128 - status


def words(who: str, status: int, finished: bool) -> str:
    """Return a sentence about a process that ended without an explanation of its own.

    Args:
        who: A description of the process, such as ``rank 1 (node7, pid 4711)``.
        status: The exit code of the process, or -N if signal N killed it.
        finished: The program had come to its end before.
    """
    while_exiting = " while it was exiting, after its program had finished" if finished else ""
    if status < 0:
        return f"{who} was killed by {signal_name(-status)}{while_exiting}."
    if status == 0:
        return f"{who} ended without finishing: something called os._exit(0), or closed the process otherwise."
    return f"{who} ended with exit code {status}{while_exiting}."


def signal_name(number: int) -> str:
    """Return the name of a signal: "SIGKILL" for 9, "signal 99" for a number that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
