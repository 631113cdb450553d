"""The ranks of an elastic job that go on in their processes when others fail.

    a rank fails ── may they go on? ── "lost" to the others ── all have said "again" ── "generation" ── all have said "together"
                          │                    │                                            │
                          └─ no: the job fails, and is started again ◀── one "cannot", or it takes too long

The launcher alone makes generations: ranks that it does not hear of each other from have none, and end with the job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdlite.errors import ranks_text
from hvdlite.launch.job.failures import Failure
from hvdlite.launch.job.ranks import Ranks
from hvdlite.launcher_link.generation import Generation
from hvdlite.launcher_link.server import ControlConnection
from hvdlite.launcher_link.session import Message, ProtocolError

_PATIENCE_SECONDS = 10.0
"""So long may the ranks that are left take to leave their functions, and again to make their new group. A rank that computes
for longer hears of nothing. One that waits inside of MPI for a rank that has failed while a group was made waits for ever."""


class Survivors:
    """What the ranks of one job do when others fail. A rank that can go on keeps a connection, on which it listens.

    Args:
        ranks: The state of each rank.
        fail: Is called with the failures without which the job cannot go on.
        explain: Is called with the reason why the ranks cannot go on in their processes.

    Attributes:
        allows: Says why the job cannot go on without some ranks, given by their numbers; empty if it can. None if the ranks of
            this job never go on in their processes.
        grant: Makes the generation that the ranks form which are left, after these failures.
    """

    def __init__(self, ranks: Ranks, fail: Callable[[Failure], None], explain: Callable[[str], None]) -> None:
        self._ranks, self._fail, self._explain = ranks, fail, explain
        self.allows: Callable[[Sequence[int]], str] | None = None
        self.grant: Callable[[Sequence[Failure]], Generation]
        self._lines: dict[ControlConnection, int] = {}
        self._calls: dict[int, int] = {}
        """For each rank that is in an elastic function, which call of ``elastic.run`` that is."""
        self._again: set[int] = set()
        self._together: set[int] = set()
        self._losses: list[Failure] = []
        """The failures after which the ranks that are left are not together again."""
        self._granted = 0
        """For how many of them there is a generation."""
        self._since = 0.0

    def hear(self, connection: ControlConnection, message: Message) -> None:
        """Act on a message "outlives", "again", "cannot", "together" or "over".

        Raises:
            ProtocolError: The job has not this rank, or has lost it, or the connection is not that of a rank.
        """
        if message.kind == "outlives":
            number = message.fields["rank"]
            if number not in self._ranks.left:
                raise ProtocolError(f"a message of rank {number}, which this job has not")
            self._lines[connection], self._calls[number] = number, message.fields["call"]
            connection.send("ok")
            return
        if connection not in self._lines:
            raise ProtocolError(f"a message {message.kind!r} of a rank that has not said which it is")
        number = self._lines[connection]
        match message.kind:
            case "again":
                self._again.add(number)
            case "together":
                self._together.add(number)
            case "cannot":
                self._give_up(f"rank {number}: {message.fields['why']}")
            case "over":
                connection.send("ok")
                if not self._losses:  # else it has been told, and comes again
                    self._calls.pop(number, None)

    def forget(self, connection: ControlConnection) -> None:
        """Note that a connection has ended."""
        self._calls.pop(self._lines.pop(connection, -1), None)

    def go_on_without(self, failure: Failure, now: float) -> bool:
        """Let the ranks go on without one that has failed, if they can. Return whether they can.

        Args:
            failure: The failure of the rank.
            now: The time, as of `time.monotonic`.
        """
        number = failure.rank
        if self.allows is None or number is None:
            return False
        if number not in self._ranks.left:
            return True
        if why := self._obstacle(number):
            self._give_up(why)
            return False
        self._ranks.lose(number)
        self._losses.append(failure)
        self._again.discard(number)
        self._since = now
        for line, listener in self._lines.items():
            if listener != number:
                reason = failure.text.rstrip().rpartition("\n")[2]
                line.send("lost", rank=number, text=f"rank {number} of the job has failed: {reason}")
        return True

    def _obstacle(self, number: int) -> str:
        assert self.allows is not None
        left = [rank for rank in self._ranks.left if rank != number]
        if self._ranks[number].gone:
            return f"the guard process of rank {number} was killed, and the MPI launcher ends the others"
        if outside := [rank for rank in left if rank not in self._calls]:
            return f"{ranks_text(outside)}, in no function of elastic.run at that moment"
        if len({self._calls[rank] for rank in left}) > 1:
            return "the ranks are in different calls of elastic.run"
        return self.allows([*(each.rank for each in self._losses[self._granted :] if each.rank is not None), number])

    def look(self, now: float) -> None:
        """Grant a generation if all ranks that are left have asked for it, and give up if that takes too long.

        Args:
            now: The time, as of `time.monotonic`.
        """
        if not self._losses:
            return
        left = self._ranks.left
        new = self._losses[self._granted :]
        if (
            new
            and self._again.issuperset(left)
            and all(self._ranks[each.rank].exited for each in new if each.rank is not None)
        ):
            generation = self.grant(new)
            self._granted, self._since, self._ranks.present = len(self._losses), now, len(left)
            self._again.clear()
            self._together.clear()
            for line in self._lines:
                line.send("generation", number=generation.number, ranks=left, committed=list(generation.committed))
        elif not new and self._together.issuperset(left):
            self._losses, self._granted = [], 0
        elif now - self._since > _PATIENCE_SECONDS:
            missing = sorted(set(left) - (self._again if new else self._together))
            what = "come out of the functions that they were in" if new else "found together in a new group"
            self._give_up(f"{ranks_text(missing)} have not {what} within {_PATIENCE_SECONDS:g} s")

    def end(self) -> list[Failure]:
        """Let the ranks go on no more, because the job ends. Return the failures that have not been got over."""
        self.allows = None
        losses, self._losses, self._granted = self._losses, [], 0
        return losses

    def _give_up(self, why: str) -> None:
        if self.allows is not None:
            self._explain(why)
            for failure in self.end():
                self._fail(failure)
