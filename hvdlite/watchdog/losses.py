"""Ranks that the job goes on without, and what a rank saves before the job is ended: what trainings on one rank have asked for.

The launcher knows for certain how a rank has ended. It tells the other ranks, if these have asked for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvdlite.errors import HvdliteError
from hvdlite.launcher_link.line import Line
from hvdlite.launcher_link.link import Address


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


class Losses:
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
