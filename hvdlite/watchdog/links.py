"""The places where ranks do the same in the same order: when one of them gets out of step there, all hear of it."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

from hvdlite.errors import CommunicationError, HvdliteError, PeerLeftError
from hvdlite.topology import Members

Place = tuple[int, int]
"""The number of a group, and of a channel within it."""


class Link:
    """One rank's end of what ranks do in step: all of them do the same there, in the same order, or none can go on.

    Args:
        links: Those of this rank.
        members: The ranks.
        channel: Tells apart what the same group has; the same number on all of its ranks.
        interrupt: Ends with an error what is under way there; called from any thread.

    Attributes:
        failure: Why nothing more can be done there; None if all is well.
    """

    def __init__(self, links: Links, members: Members, channel: int, interrupt: Callable[[HvdliteError], None]) -> None:
        self._links, self.members, self.channel, self._interrupt = links, members, channel, interrupt
        self.failure: HvdliteError | None = None

    @property
    def place(self) -> Place:
        """What the ranks call this link among themselves."""
        return self.members.id, self.channel

    def check(self) -> None:
        """Raise why nothing more can be done."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    def fail(self, error: HvdliteError) -> None:
        """Nothing more can be done here."""
        if self.failure is None:
            self.failure = error
            self._links.failed(self, error)
            self._interrupt(error)

    def break_off(self, what: str, error: BaseException) -> None:
        """This rank has left `what` in the middle, by `error`: tell the others at once, who wait for it there."""
        if self.failure is None:
            reason = f"{type(error).__name__}: {str(error) or 'no reason given'}"
            self._links.tell_failure(self, f"has failed in {what}: {reason}")
            self.fail(
                CommunicationError(
                    f"this rank has left {what} in the middle ({reason}), so it is not in step with the others any more."
                )
            )

    def give_up(self, error: HvdliteError) -> None:
        """As `fail`, on all ranks."""
        if self.failure is None:
            self._links.tell_failure(self, f"has given up:\n{error}")
            self.fail(error)


class Links:
    """The links of one rank, found again when other ranks write about them.

    Args:
        rank: This rank.
        post: Sends a message to another rank's `hear_failure`: to whom, its kind, and what it says.
        failed: Is told of a link that has failed, and why: whoever waits there should soon wait no more.
    """

    def __init__(self, rank: int, post: Callable[..., None], failed: Callable[[Link, HvdliteError], None]) -> None:
        self._rank, self._post, self.failed = rank, post, failed
        self._links: WeakValueDictionary[Place, Link] = WeakValueDictionary()
        self._failures: dict[Place, str] = {}  # of links that are not there yet

    def new(self, members: Members, channel: int, interrupt: Callable[[HvdliteError], None]) -> Link:
        """A new link; arguments as for `Link`. It takes the place of an earlier one of the same group and channel."""
        link = Link(self, members, channel, interrupt)
        self._links[link.place] = link
        if (text := self._failures.pop(link.place, None)) is not None:
            link.fail(PeerLeftError(text))
        return link

    def tell_failure(self, link: Link, text: str) -> None:
        """Tell the other ranks of a link that this rank is out of step there; `text` goes on after "rank 3 ..."."""
        for rank in link.members.ranks:
            if rank != self._rank:
                self._post(rank, "failed", link.place, text)

    def hear_failure(self, sender: int, place: Place, text: str) -> None:
        """Another rank has called `tell_failure`."""
        text = f"rank {sender} {text}\nThis rank needs it there, so it cannot go on either."
        link = self._links.get(place)
        if link is None:
            self._failures[place] = text
        else:
            link.fail(PeerLeftError(text))

    def fail_all(self, error: HvdliteError) -> None:
        """Whoever begins something at any link gets `error`. Nothing is interrupted."""
        for link in list(self._links.values()):
            link.failure = error
