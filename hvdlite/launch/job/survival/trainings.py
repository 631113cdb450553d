"""What ranks that train with a parameter server have asked of hvdliterun: to go on if some of them fail, and time to save."""

from __future__ import annotations

import time

from hvdlite.launch.job.failures import Failure
from hvdlite.launch.job.ranks import Rank, Ranks
from hvdlite.launcher_link.server import ControlConnection
from hvdlite.launcher_link.session import Message

_SAVE_SECONDS = 1.2


class Trainings:
    """The wishes of the ranks of one job. A rank says them over a connection of its own, on which it listens.

    Args:
        ranks: The state of each rank.

    Attributes:
        losses: The failures of ranks without which the job goes on.
        is_ending: Whether the job fails. Then it does not go on without a rank any more.
        saved: What a rank has said about the file that it has saved before the end; empty if no rank has.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._listeners: dict[ControlConnection, int] = {}
        self._dispensable: set[int] = set()
        self._savers: set[int] = set()
        self._saver: Rank | None = None
        self._save_until: float | None = None
        self.losses: list[Failure] = []
        self.is_ending = False
        self.saved = ""

    def hear(self, connection: ControlConnection, message: Message) -> None:
        """Take the wishes of a rank: a message "training". They replace those that it has said before.

        Raises:
            ProtocolError: The job has not this rank, or not so many.
        """
        number = message.fields["rank"]
        self._ranks.check(number, message.fields["size"])
        self._listeners[connection] = number
        for wish, ranks in (("dispensable", self._dispensable), ("saves", self._savers)):
            (ranks.add if message.fields[wish] else ranks.discard)(number)
        connection.send("ok")
        for loss in self.losses:
            self._tell(connection, loss)

    def forget(self, connection: ControlConnection) -> None:
        """Note that a connection has ended."""
        self._listeners.pop(connection, None)

    def take_saved(self, text: str) -> None:
        """Take what a rank says about the file that it has saved."""
        self.saved, self._save_until = text, None

    def go_on_without(self, failure: Failure) -> bool:
        """Go on without a rank, and tell the others; return whether that is possible.

        It is, if the rank has said so, and so has another one that still runs; and if the job does not fail anyway.
        """
        number = failure.rank
        running = [other for other in self._dispensable if other != number and not self._ranks[other].exited]
        if number is None or self.is_ending or number not in self._dispensable or not running:
            return False
        self.losses.append(failure)
        self._ranks.lose(number)  # the guards hear it before the ranks do
        for connection, listener in self._listeners.items():
            if listener != number:
                self._tell(connection, failure)
        return True

    def _tell(self, connection: ControlConnection, loss: Failure) -> None:
        connection.send("lost", rank=loss.rank, text=loss.text.rstrip().rpartition("\n")[2])

    def describe(self) -> str:
        """Return in full lines what the user is to know of it at the end; empty if there is nothing to say."""
        lines = [
            f"hvdliterun: the job has gone on without rank {loss.rank} on host {loss.host}, which failed (exit code "
            f"{loss.code}):\n{loss.text.rstrip()}\n"
            for loss in self.losses
        ]
        return "".join([*lines, f"hvdliterun: {self.saved}\n" if self.saved else ""])

    def are_saving(self) -> bool:
        """Let the lowest rank that lives save what it has, if it has asked for that. Return whether it is not done yet."""
        now = time.monotonic()
        if self._saver is None:
            living = [(number, each) for each, number in self._listeners.items() if self._may_save(number)]
            if not living:
                return False
            number, connection = min(living, key=lambda each: each[0])
            self._saver, self._save_until = self._ranks[number], now + _SAVE_SECONDS
            connection.send("save")
        return self._save_until is not None and now < self._save_until and not self._saver.exited

    def _may_save(self, number: int) -> bool:
        rank = self._ranks[number]
        return number in self._savers and not rank.exited and not rank.reported and rank.stopped_at is None
