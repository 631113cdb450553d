"""Links between ranks that do the same in the same order. If a rank gets out of step on a link, all its ranks learn of it."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

from hvdlite.errors import CommunicationError, HvdliteError, PeerLeftError
from hvdlite.topology import Members

Place = tuple[int, int]
"""The name of a link among the ranks: the number of a group, and the number of a channel in this group."""


class Link:
    """One rank's end of a link. The ranks of a link do the same in the same order, or none of them can go on.

    Args:
        links: The links of this rank.
        members: The ranks of the link.
        channel: A number that tells apart the links of one group; the same on all its ranks.
        interrupt: A function that ends a wait on the link with an error. Any thread may call it.

    Attributes:
        failure: The error that has broken the link; None if there is none.
    """

    def __init__(self, links: Links, members: Members, channel: int, interrupt: Callable[[HvdliteError], None]) -> None:
        self._links, self.members, self.channel, self._interrupt = links, members, channel, interrupt
        self.failure: HvdliteError | None = None

    @property
    def place(self) -> Place:
        """The name of this link among the ranks."""
        return self.members.id, self.channel

    def check(self) -> None:
        """Raise the error that has broken the link, if there is one."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    def fail(self, error: HvdliteError) -> None:
        """Break the link on this rank: waits end with `error`, and later calls of `check` raise it."""
        if self.failure is None:
            self.failure = error
            self._links.failed(self, error)
            self._interrupt(error)

    def break_off(self, what: str, error: BaseException) -> None:
        """Break the link on all ranks at once: `error` made this rank leave `what` in the middle."""
        if self.failure is None:
            reason = f"{type(error).__name__}: {str(error) or 'no reason given'}"
            self._links.tell_failure(self, f"has failed in {what}: {reason}")
            self.fail(
                CommunicationError(
                    f"this rank has left {what} in the middle ({reason}), so it is not in step with the others any more."
                )
            )

    def give_up(self, error: HvdliteError) -> None:
        """Break the link with `error`, on all ranks."""
        if self.failure is None:
            self._links.tell_failure(self, f"has given up:\n{error}")
            self.fail(error)


class Links:
    """The links of one rank, by the names that messages of other ranks use.

    Args:
        rank: The number of this rank.
        post: A function that sends a message to `hear_failure` of another rank: called with the rank, the kind, and the
        content.
        failed: A function that is called with a broken link and its error. The waits on the link should end soon after.
    """

    def __init__(self, rank: int, post: Callable[..., None], failed: Callable[[Link, HvdliteError], None]) -> None:
        self._rank, self._post, self.failed = rank, post, failed
        self._links: WeakValueDictionary[Place, Link] = WeakValueDictionary()
        self._failures: dict[Place, str] = {}  # failures of links that this rank has not made yet

    def new(self, members: Members, channel: int, interrupt: Callable[[HvdliteError], None]) -> Link:
        """Make a link. See `Link` for the arguments. It replaces an earlier link of the same group and channel."""
        link = Link(self, members, channel, interrupt)
        self._links[link.place] = link
        if (text := self._failures.pop(link.place, None)) is not None:
            link.fail(PeerLeftError(text))
        return link

    def tell_failure(self, link: Link, text: str) -> None:
        """Tell the other ranks of a link that this rank is out of step. `text` continues the words "rank 3 ..."."""
        for rank in link.members.ranks:
            if rank != self._rank:
                self._post(rank, "failed", link.place, text)

    def hear_failure(self, sender: int, place: Place, text: str) -> None:
        """Handle the message that another rank has sent by `tell_failure`."""
        text = f"rank {sender} {text}\nThis rank needs it there, so it cannot go on either."
        link = self._links.get(place)
        if link is None:
            self._failures[place] = text
        else:
            link.fail(PeerLeftError(text))

    def fail_all(self, error: HvdliteError) -> None:
        """Let everything that begins on any link raise `error`. This interrupts no wait."""
        for link in list(self._links.values()):
            link.failure = error
