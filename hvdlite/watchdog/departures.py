"""Ranks that have left the job, those that it goes on without, and what a rank saves before the job is ended.

Every rank says when it leaves. How a rank has ended the launcher knows for certain, and tells it to the ranks whose trainings
have asked for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from hvdlite.errors import HvdliteError
from hvdlite.launcher_link.line import Line
from hvdlite.launcher_link.link import Address


class Departures:
    """The ranks that have left the job.

    Args:
        size: The number of ranks in the job.

    Attributes:
        left: For each rank that has left, the time of `time.monotonic` at which this rank has heard of it.
        farewells: For each of them, how it has left.
        are_complete: Set when all ranks have left.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.left: dict[int, float] = {}
        self.farewells: dict[int, str] = {}
        self.are_complete = threading.Event()

    def wait(self, is_alive: Callable[[], bool], seconds: float) -> list[int]:
        """Wait until all ranks have left. Return those that have not.

        Args:
            is_alive: Whether the thread still runs that hears of them. If not, there is nothing to wait for.
            seconds: The longest time.
        """
        end = time.monotonic() + seconds
        while not self.are_complete.wait(1.0) and is_alive() and time.monotonic() <= end:
            pass
        return [rank for rank in range(self._size) if rank not in self.left]

    def note(self, rank: int, farewell: str) -> None:
        """Note that a rank has left."""
        self.left[rank], self.farewells[rank] = time.monotonic(), farewell
        if len(self.left) == self._size:
            self.are_complete.set()


@dataclass(frozen=True, eq=False)
class Wish:
    """What one training on this rank wants if ranks fail.

    Attributes:
        dispensable: The others go on, if it is this rank.
        lost: Called in the watchdog's thread with the number of a rank that has failed, and without which the job goes on.
        save: Called in the watchdog's thread before the job is ended, on one rank that has such a function. It returns what
            the user is to know about the file. None if there is nothing to save.
    """

    dispensable: bool = False
    lost: Callable[[int], None] | None = None
    save: Callable[[], str] | None = None


class LostRanks:
    """The wishes of the trainings of one rank, and what its launcher has said.

    Args:
        rank: This rank.
        size: The number of ranks in the job.
        control: The setting ``control``; empty if there is no launcher that could be asked.

    Attributes:
        lost: For each rank without which the job goes on, why it has failed.
    """

    def __init__(self, rank: int, size: int, control: str) -> None:
        self._rank, self._size, self._control = rank, size, control
        self._link: Line | None = None
        self._wishes: list[Wish] = []
        self.lost: dict[int, str] = {}

    def add(self, wish: Wish) -> None:
        """Ask for what a training wants, which begins. All its ranks do this.

        Raises:
            HvdliteError: The launcher does not answer, or its job has other ranks than this one.
        """
        self._wishes.append(wish)
        try:
            self._link = self._link or Line(Address.parse(self._control))
            self._ask()
        except (OSError, ValueError) as error:
            raise HvdliteError(
                f"hvdliterun does not answer rank {self._rank} of {self._size} ({error}). Under hvdliterun call hvdlite.init() "
                "without comm, so that the job has all ranks."
            ) from error

    def remove(self, wish: Wish) -> None:
        """Take back what a training wanted, which is over."""
        self._wishes.remove(wish)
        try:
            self._ask()
        except OSError:
            self._link = None  # the launcher has ended, and all ranks end too

    def _ask(self) -> None:
        if self._link is not None:
            dispensable = bool(self._wishes) and all(wish.dispensable for wish in self._wishes)
            saves = any(wish.save for wish in self._wishes)
            self._link.ask("training", rank=self._rank, size=self._size, dispensable=dispensable, saves=saves)

    def look(self, note: Callable[[int, str], None]) -> None:
        """Do what the launcher has said. The watchdog calls this.

        Args:
            note: Is called with each rank that was lost, and how.
        """
        if self._link is None:
            return
        try:
            heard = self._link.hear()
        except OSError:
            self._link = None
            return
        for message in heard:
            if message.kind == "lost":
                rank, text = message.fields["rank"], message.fields["text"]
                self.lost[rank] = text
                note(rank, f"it was lost: {text}")
                for wish in list(self._wishes):
                    if wish.lost is not None:
                        wish.lost(rank)
            elif message.kind == "save":
                text = "\n".join(wish.save() for wish in self._wishes if wish.save is not None)
                self._link.tell("saved", text=text)
