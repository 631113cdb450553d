"""The control messages of one generation of an elastic job: what its ranks have committed, and what becomes of the hosts.

Rank 0 speaks for all, over a connection that it keeps: its ranks commit and leave together.
"""

from __future__ import annotations

from collections.abc import Callable

from hvdlite.launch.job.ranks import Ranks
from hvdlite.launcher_link.server import ControlConnection
from hvdlite.launcher_link.session import Message, ProtocolError


class Elastic:
    """What one generation of an elastic job has said, and is told.

    Args:
        ranks: The state of each rank.

    Attributes:
        on_commit: Is called with each commit: the number of the call of ``elastic.run``, from 0 on, and that of the commit.
        has_left: The ranks leave because the hosts have changed, and their state is committed.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.on_commit: Callable[[int, int], None] | None = None
        self.has_left = False
        self._ranks = ranks
        self._speaker: ControlConnection | None = None
        self._update = 0

    def hear(self, connection: ControlConnection, message: Message) -> None:
        """Act on a message "elastic", "committed" or "leaving".

        Raises:
            ProtocolError: It does not come from rank 0, or the job has not so many ranks.
        """
        if message.kind == "elastic":
            if not 0 <= message.fields["rank"] < message.fields["size"] == self._ranks.present:
                raise ProtocolError(f"a message of one of {message.fields['size']} ranks, not {self._ranks.present}")
            self._speaker = connection
            connection.send("ok")
            if self._update:
                connection.send("hosts", update=self._update)
        elif connection is not self._speaker:
            raise ProtocolError(f"a message {message.kind!r} of a rank that does not speak for its job")
        elif message.kind == "leaving":
            self.has_left = True
            connection.send("ok")
        elif self.on_commit is not None:
            self.on_commit(message.fields["call"], message.fields["number"])

    def forget(self, connection: ControlConnection) -> None:
        """Note that a connection has ended."""
        if connection is self._speaker:
            self._speaker = None

    def tell(self, update: int) -> None:
        """Tell the ranks what has become of the hosts: `hvdlite.launcher_link.generation.REMOVED`, `ADDED` or both."""
        self._update |= update
        if self._speaker is not None:
            self._speaker.send("hosts", update=update)
