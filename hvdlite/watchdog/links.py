"""Links: sequences of matching calls of several ranks. When one rank gets out of step in a link, all of its ranks are told."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

from hvdlite.errors import CommunicationError, HvdliteError, PeerLeftError
from hvdlite.ranks.topology import Members
from hvdlite.watchdog.letters import Letter, Letters, LinkId


class Link:
    """One rank's end of a link. All ranks of a link make the same calls in the same order, or none can go on.

    Args:
        links: The links of this rank.
        members: The ranks of the link.
        channel: The number that tells this link from others of the same group, equal on all ranks.
        interrupt: Ends with an error what is under way in the link. Any thread may call it.

    Attributes:
        failure: The error with which the link has failed; None while all is well.
        letters: What this rank has sent and received there, if messages of one rank to another go through the link.
    """

    def __init__(self, links: Links, members: Members, channel: int, interrupt: Callable[[HvdliteError], None]) -> None:
        self._links, self.members, self.channel, self._interrupt = links, members, channel, interrupt
        self.failure: HvdliteError | None = None
        self.letters: Letters | None = None

    @property
    def id(self) -> LinkId:
        """The name of this link in messages between its ranks."""
        return self.members.id, self.channel

    def check(self) -> None:
        """Raise the error with which the link has failed, if it has."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    def fail(self, error: HvdliteError) -> None:
        """Let the link fail on this rank: what is under way ends with `error`, and later calls raise it."""
        if self.failure is None:
            self.failure = error
            self._links.failed(self, error)
            self._interrupt(error)

    def break_off(self, what: str, error: BaseException) -> None:
        """Tell the other ranks at once that this rank has left `what` in the middle, by `error`: they wait for this rank."""
        if self.failure is None:
            reason = f"{type(error).__name__}: {str(error) or 'no reason given'}"
            self._links.tell_failure(self, f"has failed in {what}: {reason}")
            self.fail(
                CommunicationError(
                    f"this rank has left {what} in the middle ({reason}), so it is not in step with the others any more."
                )
            )

    def give_up(self, error: HvdliteError) -> None:
        """Let the link fail on all ranks."""
        if self.failure is None:
            self._links.tell_failure(self, f"has given up:\n{error}")
            self.fail(error)


class Links:
    """The links of one rank, by the names that other ranks use in their messages.

    Args:
        rank: This rank.
        post: ``post(rank, kind, *content)`` sends a control message to another rank's `hear_failure`.
        failed: Called with each link that has failed, and its error. Whoever waits in this link should soon wait no more.
    """

    def __init__(self, rank: int, post: Callable[..., None], failed: Callable[[Link, HvdliteError], None]) -> None:
        self._rank, self._post, self.failed = rank, post, failed
        self._links: WeakValueDictionary[LinkId, Link] = WeakValueDictionary()
        self._failures: dict[LinkId, str] = {}  # the failures of links that this rank has not made yet

    def new(self, members: Members, channel: int, interrupt: Callable[[HvdliteError], None]) -> Link:
        """Make a link, with the arguments of `Link`. It replaces an earlier one of the same group and channel."""
        link = Link(self, members, channel, interrupt)
        self._links[link.id] = link
        if (text := self._failures.pop(link.id, None)) is not None:
            link.fail(PeerLeftError(text))
        return link

    def tell_failure(self, link: Link, text: str) -> None:
        """Tell the other ranks of a link that this rank is out of step. `text` continues the sentence "rank 3 ..."."""
        for rank in link.members.ranks:
            if rank != self._rank:
                self._post(rank, "failed", link.id, text)

    def hear_failure(self, sender: int, link_id: LinkId, text: str) -> None:
        """Take the message that another rank has called `tell_failure`."""
        text = f"rank {sender} {text}\nThis rank needs it there, so it cannot go on either."
        link = self._links.get(link_id)
        if link is None:
            self._failures[link_id] = text
        else:
            link.fail(PeerLeftError(text))

    def did_its_part(self, letter: Letter | None) -> bool | None:
        """Return whether this rank has begun to send or to receive a message; None if that is not known."""
        link = None if letter is None else self._links.get(letter.link)
        return None if letter is None or link is None or link.letters is None else link.letters.did_its_part(letter)

    def fail_all(self, error: HvdliteError) -> None:
        """Let every link fail: whoever begins something in a link gets `error`. Nothing is interrupted."""
        for link in list(self._links.values()):
            link.failure = error
