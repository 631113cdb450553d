"""What a rank has done for the messages of a channel: so a report can say that a message was sent and did not arrive."""

from __future__ import annotations

from typing import NamedTuple

from hvdlite.protocols import ANY

LinkId = tuple[int, int]
"""The number of a group, and the number of a channel within the group: the ranks' common name of a link."""


class Letter(NamedTuple):
    """A message for which a rank waits. Both of its ranks count the messages of a channel, pair and tag alike.

    Attributes:
        link: The channel.
        sender, receiver: Ranks of its group.
        tag: The tag.
        number: How many of the same channel, pair and tag were before this one.
    """

    link: LinkId
    sender: int
    receiver: int
    tag: int
    number: int


class Letters:
    """The messages of one channel that this rank has begun.

    Args:
        link: The channel.
        rank: This rank of its group.
    """

    def __init__(self, link: LinkId, rank: int) -> None:
        self._link, self._rank = link, rank
        self._begun: dict[tuple[int, int, int], int] = {}
        """By sender, receiver and tag: how many messages."""
        self._uncountable: set[int] = set()
        """Tags of receives that took a message of any rank, or none: which message is whose cannot be counted."""

    def begin(self, sender: int, receiver: int, tag: int) -> Letter | None:
        """Note that this rank begins to send or to receive a message. Return it, unless it cannot be told from others."""
        if sender == ANY:
            self._uncountable.add(tag)
        if sender in (ANY, receiver):  # both ends of what a rank sends to itself would be counted here
            return None
        key = sender, receiver, tag
        number = self._begun.get(key, 0)
        self._begun[key] = number + 1
        receives = receiver == self._rank
        return None if receives and tag in self._uncountable else Letter(self._link, *key, number)

    def cancelled(self, letter: Letter) -> None:
        """Note that this rank has given up a receive."""
        self._uncountable.add(letter.tag)

    def did_its_part(self, letter: Letter) -> bool | None:
        """Return whether this rank has begun to send or to receive a message; None if that is not certain."""
        if letter.receiver == self._rank and letter.tag in self._uncountable:
            return None
        return letter.number < self._begun.get((letter.sender, letter.receiver, letter.tag), 0)
