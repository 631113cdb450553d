"""How long ranks take to end after their programs are finished, and what keeps those that do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from hvdlite.config import Config
from hvdlite.launch.job.failures import Failure
from hvdlite.launch.job.ranks import STACK_SECONDS, Rank, Ranks

_NOTE_SECONDS = 10.0


class SlowExit:
    """Finds the ranks that do not end, although the programs of all ranks are finished.

    Args:
        ranks: The ranks. Their programs have just finished.
        settings: The settings of the job.
        say: Prints a note.
        now: The time, as of `time.monotonic`.
    """

    def __init__(self, ranks: Ranks, settings: Config, say: Callable[[str], None], now: float) -> None:
        self._ranks, self._say = ranks, say
        self._departure = Departure(ranks, now)
        counts = settings.stall_shutdown_time_seconds > 0 and not settings.stall_check_disable
        self._limit = settings.stall_shutdown_time_seconds if counts else float("inf")
        self._next_look = min(_NOTE_SECONDS, settings.stall_check_time_seconds)
        self._is_noted = False
        self._stacks_until: float | None = None
        self.only_launcher_is_left = False
        """Whether all ranks have ended, and the MPI launcher has had enough time to do so too."""

    def look(self, now: float) -> Failure | None:
        """Say which ranks a thread or an exit handler keeps, and where. Return a failure if others wait too long for them."""
        seconds = self._departure.seconds(self._ranks, now)
        if seconds <= self._next_look:
            return None
        left = [rank for rank in self._ranks if not rank.exited]
        self.only_launcher_is_left = not left
        if self._stacks_until is None:
            self._stacks_until = now + STACK_SECONDS
            for rank in left:
                rank.show()
        elif left and (now > self._stacks_until or all(rank.stack is not None for rank in left)):
            self._stacks_until, self._next_look = None, max(self._next_look, self._limit) + self._is_noted * seconds
            return self._judge(left)
        return None

    def _judge(self, left: list[Rank]) -> Failure | None:
        # The others wait at their ends for these.
        kept = [rank for rank in left if not rank.waits_for_others] or left
        names, stacks = ", ".join(map(str, kept)), "\n".join((rank.stack or "").rstrip("\n") for rank in kept)
        if self._is_noted:
            if len(kept) == self._ranks.present:  # they do not wait for each other
                return None
            text = (
                f"a thread or an exit handler keeps {names}, for which others wait. It is here:\n{stacks}\n"
                f"It is waited for no longer: the limit for one wait is {self._limit:g} s."
            )
            return Failure(text, 1, time.time(), kept[0].number, kept[0].host)
        self._is_noted = True
        self._say(
            f"hvdliterun: every rank's program has finished, but a thread or an exit handler keeps {names}. It is here:\n"
            f"{stacks}\n"
        )
        return None


class Departure:
    """Measures how long ranks take to end after their programs are finished.

    The time that a rank waits for a core does not count: on a busy machine it may be long, and is no fault of the rank.

    Args:
        ranks: All ranks of the job.
        now: The time, as of `time.monotonic`, from which on it measures.
        starved: Returns the seconds for which a process of this machine, given by its id, has waited for a core since it
            started. By default Linux is asked.
    """

    def __init__(self, ranks: Iterable[Rank], now: float, starved: Callable[[int], float] | None = None) -> None:
        self._starved = starved or _starved_seconds
        self._since = now
        self._before = {rank.number: self._starved(rank.pid) for rank in ranks if rank.local}

    def seconds(self, ranks: Iterable[Rank], now: float) -> float:
        """Return the seconds since the beginning, less the longest time that a rank here, not ended yet, waited for a core."""
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
