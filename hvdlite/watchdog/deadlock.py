"""Two ranks that wait for each other, each for something else, so that neither can go on.

Operations of one group of ranks are compared by their controller; this is about waits that no controller sees together: a
gradient exchange and an operation, exchanges of different gradients, operations of different process sets, `join` and an
exchange.

A rank is stuck if all of its threads that use hvdlite wait, and have for some time. It tells rank 0 what it needs.
Rank 0 introduces ranks to each other that are stuck in different things, and these find out whether it is true. A rank
*lacks* what the other needs if it has not done its part. If each is stuck and lacks what the other needs, then that is so
for good: a rank that is stuck does nothing but what another makes it do. Neither relies on what it has heard of the other
being up to date, for each judges its own part, and answers for the state that the other has asked about, by its number.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple


class Need(NamedTuple):
    """What a stuck rank waits for.

    Attributes:
        ranks: The world ranks that must take part, each of them.
        operation: The key of an operation; None for an exchange of gradients.
        number: Of an operation: the plans that its controller has followed. Of an exchange: its number among those of `ranks`
            in its channel.
        text: It in words.
        channel: Of an exchange: which gradients; all ranks exchange those of one channel in the same order.
    """

    ranks: tuple[int, ...]
    operation: str | int | None
    number: int
    text: str
    channel: int = 0


Needs = tuple[Need, ...]
Post = Callable[[int, str, object], None]
"""Sends a letter: to whom, its kind, and what it says."""


class DeadlockDetector:
    """One rank's part in the search.

    Args:
        rank: This rank.
        post: Sends letters; what arrives is for `receive`.
        lacks: Whether this rank has not done its part of something that others need.
    """

    KINDS = frozenset({"stuck", "introduce", "lacks"})

    def __init__(self, rank: int, post: Post, lacks: Callable[[Need], bool]) -> None:
        self._rank = rank
        self._post = post
        self._lacks = lacks
        self._numbers = itertools.count()
        self._number = -1
        self._needs: Needs = ()
        self._others: dict[int, tuple[int, Needs]] = {}  # stuck ranks that may wait for this one, and their number
        self._given: dict[int, tuple[int, int]] = {}  # answers to them: in which state of this rank, to which of theirs
        self._received: dict[
            int, tuple[int, int]
        ] = {}  # answers from them: in which state of theirs, to which of this rank
        self._stuck: dict[int, tuple[int, Needs]] = {}  # rank 0: all stuck ranks

    def look(self, needs: Needs) -> str | None:
        """Look again.

        Args:
            needs: What this rank needs to go on; empty if it is not stuck.

        Returns:
            Who waits for whom, if this rank can never go on.
        """
        if needs != self._needs:
            self._needs, self._number = needs, next(self._numbers)
            self._post(0, "stuck", (self._number, needs))
        if not needs:
            return None
        for other, (number, theirs) in self._others.items():
            answer = self._number, number
            if self._given.get(other) != answer and all(self._lacks(need) for need in theirs):
                self._given[other] = answer
                self._post(other, "lacks", answer)
            if self._given.get(other) == answer and self._received.get(other) == (number, self._number):
                del self._others[other]  # it is told once
                return _text({self._rank: needs, other: theirs})
        return None

    def receive(self, sender: int, kind: str, content: Any) -> None:
        """Another rank's letter."""
        if kind == "stuck":
            self._compare(sender, *content)
        elif kind == "introduce":
            other, number, needs = content
            self._others[other] = number, needs
        else:
            self._received[sender] = content

    def _compare(self, rank: int, number: int, needs: Needs) -> None:
        """Rank 0: introduce a stuck rank to one of each kind of those that may wait for it."""
        self._stuck.pop(rank, None)
        if not needs:
            return
        met = set()
        for other, (their_number, theirs) in self._stuck.items():
            kind = _places(theirs)
            if kind not in met and _may_wait_for_each_other(rank, needs, other, theirs):
                met.add(kind)
                self._post(rank, "introduce", (other, their_number, theirs))
                self._post(other, "introduce", (rank, number, needs))
        self._stuck[rank] = number, needs


def _places(needs: Needs) -> frozenset[tuple[tuple[int, ...], bool, int]]:
    """Where a rank waits: groups of ranks, and whether in an operation there, or in which exchange."""
    return frozenset((need.ranks, need.operation is not None, need.channel) for need in needs)


def _may_wait_for_each_other(rank: int, needs: Needs, other: int, theirs: Needs) -> bool:
    apart = not _places(needs) & _places(
        theirs
    )  # else it is their controller's business, or they are in the same exchange
    return apart and all(other in need.ranks for need in needs) and all(rank in need.ranks for need in theirs)


def _text(needs: dict[int, Needs]) -> str:
    lines = [f"  rank {rank} waits for {' and '.join(need.text for need in needs[rank])}" for rank in sorted(needs)]
    return "two ranks wait for each other, so neither can go on:\n" + "\n".join(lines)
