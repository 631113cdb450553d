"""Finds deadlocks: ranks that wait for each other, each for something else, so that none of them can go on.

The controller of a group compares the operations of the group. The deadlock detector compares the waits that no controller sees
together: a gradient exchange and an operation, exchanges of different gradients, operations of different process sets,
`join` and an exchange, messages from one rank to another.

A rank is *stuck* if all of its threads that use hvdlite wait, and have waited for some time. A stuck rank tells rank 0 what it
needs. A rank *lacks* what another rank needs if it has not done its part of it: this is an edge of the wait-for graph. A set of
stuck ranks is deadlocked if everything that any rank of the set needs is lacked by another rank of the set, for a stuck rank
does nothing until one of its needs is met. Rank 0 searches for such sets::

    ranks       stuck(what I need) ──►             lacks(some of these) ──►
    rank 0                            asked(these) ──►                     deadlock(who waits for whom) ──►

What rank 0 has heard may be out of date. So rank 0 asks all ranks that are stuck as far as it knows. A rank that has left its
state since then says so before it answers, and rank 0 leaves this rank out. Therefore all other ranks were stuck at once when
rank 0 asked the first question: each in the state that rank 0 knows, and each lacked what it says. None of them can go on
before another one of them does, so the deadlock is permanent.

In the terms of E. Knapp, "Deadlock detection in distributed databases", ACM Computing Surveys 19(4), 1987, this is the AND-OR
model: a need is met by all of its ranks, and a rank can go on when any of its needs is met.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from hvdlite.ranks.topology import Members
from hvdlite.watchdog.letters import Letter

_ROUND_LOOKS = 8
"""How often rank 0 looks for answers before it asks again, for a rank may be stopped or dead."""


class Need(NamedTuple):
    """What a stuck rank waits for.

    Attributes:
        members: The ranks that must take part; all of them must.
        operation: The key of the operation; None if the rank waits for a gradient exchange or a message.
        number: For an operation, the number of plans that its controller has followed. For a gradient exchange, its number
            among the exchanges of the channel.
        text: A description for the error message.
        channel: For a gradient exchange, the number of the channel, which stands for certain gradients. All ranks make
            the exchanges of a channel in the same order.
        letter: For a message, which one; its sender and its receiver are the members.
    """

    members: Members
    operation: str | int | None
    number: int
    text: str
    channel: int = 0
    letter: Letter | None = None

    @property
    def sequence(self) -> tuple[int, bool, int, Letter | None]:
        """The sequence of matching calls in which the rank waits: its group, whether it has operations, channel, message."""
        return self.members.id, self.operation is not None, self.channel, self.letter


Needs = tuple[Need, ...]
Post = Callable[[int, str, object], None]
"""``post(rank, kind, content)`` sends a control message to a rank."""
Blockers = Mapping[Need, Collection[int]]
"""The ranks that lack what is needed, by need. No rank lacks what it needs itself."""


class DeadlockDetector:
    """One rank's part in the search for deadlocks.

    Args:
        rank: This rank.
        post: Sends a control message. Whoever receives such messages hands them to `receive`.
        lacks: Returns whether this rank has not done its part of what another rank needs.
    """

    KINDS = frozenset({"stuck", "asked", "lacks", "deadlock"})

    def __init__(self, rank: int, post: Post, lacks: Callable[[Need], bool]) -> None:
        self._post = post
        self._lacks = lacks
        self._numbers = itertools.count()
        self._number = -1
        self._needs: Needs = ()
        self._asked: tuple[int, Needs] | None = None
        self._told: str | None = None
        self._search = _Search(post) if rank == 0 else None

    def look(self, needs: Needs) -> str | None:
        """Take the next step of the search; the watchdog calls this again and again.

        Args:
            needs: What this rank needs to go on; empty if it is not stuck.

        Returns:
            A text that says which rank waits for which, if this rank is deadlocked; else None.
        """
        if needs != self._needs:
            self._needs, self._number, self._told = needs, next(self._numbers), None
            self._post(0, "stuck", (self._number, needs))
        if self._asked is not None:
            # The answer comes after the message that this rank has changed its state, if it has.
            (round_number, questions), self._asked = self._asked, None
            self._post(0, "lacks", (round_number, [self._lacks(need) for need in questions]))
        if self._search is not None:
            self._search.look()
        told, self._told = self._told, None
        return told

    def receive(self, sender: int, kind: str, content: Any) -> None:
        """Take a control message from another rank, or from this one."""
        if kind == "asked":
            self._asked = content
        elif kind == "deadlock":
            number, text = content
            if number == self._number:
                self._told = text
        elif self._search is not None:
            if kind == "stuck":
                self._search.hear(sender, *content)
            else:
                self._search.hear_answer(sender, *content)


class _Round:
    """One round of questions to stuck ranks: which of the needs does each of them lack?

    Args:
        number: The number of the round.
        stuck: The ranks that may be deadlocked, each with the number of its state and its needs.
        questions: The needs about which each of these ranks is asked.
    """

    def __init__(self, number: int, stuck: Mapping[int, tuple[int, Needs]], questions: Mapping[int, Needs]) -> None:
        self.number = number
        self.stuck = dict(stuck)
        self.questions = questions
        self.answers: dict[int, list[bool]] = {}
        self._looks = 0

    def look(self) -> bool:
        """Return whether the round is over: all ranks that are still in their states have answered, or it has lasted long."""
        self._looks += 1
        return self._looks > _ROUND_LOOKS or all(
            rank in self.answers for rank, asked in self.questions.items() if asked and rank in self.stuck
        )

    def blockers(self) -> Blockers:
        """Return who lacks what, among the ranks that have answered and are still in their states."""
        found: dict[Need, list[int]] = {}
        for rank, lacked in self.answers.items():
            if rank in self.stuck:
                for need, is_lacked in zip(self.questions[rank], lacked, strict=True):
                    if is_lacked:
                        found.setdefault(need, []).append(rank)
        return found


class _Search:
    """Rank 0's part of the search: it knows all stuck ranks, and asks them."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._numbers = itertools.count()
        self._stuck: dict[int, tuple[int, Needs]] = {}
        self._round: _Round | None = None
        self._is_news = False
        self._told: dict[int, int] = {}  # the number of the state in which a rank was told of its deadlock

    def hear(self, rank: int, number: int, needs: Needs) -> None:
        """Take the message that a rank is in another state than before."""
        self._is_news = True
        self._stuck.pop(rank, None)
        if needs:
            self._stuck[rank] = number, needs
        if self._round is not None:
            self._round.stuck.pop(rank, None)

    def hear_answer(self, rank: int, round_number: int, lacked: list[bool]) -> None:
        """Take the answer of a rank: whether it lacks each need that it was asked about."""
        if self._round is not None and self._round.number == round_number:
            self._round.answers[rank] = lacked

    def look(self) -> None:
        """Judge the answers of a round that is over, and begin a new round if something has changed."""
        if self._round is not None:
            if not self._round.look():
                return
            self._tell(self._round)
            self._round = None
        if self._is_news:
            self._is_news = False
            self._ask()

    def _ask(self) -> None:
        """Begin a round: ask the ranks that may be deadlocked."""
        may_lack = {}
        for need in {need for _, needs in self._stuck.values() for need in needs}:
            # Ranks that wait in the same sequence are in the same exchange, or their controller compares them.
            there = {rank for rank in need.members.ranks if rank in self._stuck}
            may_lack[need] = {
                rank for rank in there if all(own.sequence != need.sequence for own in self._stuck[rank][1])
            }
        stuck = _deadlocked(self._stuck, may_lack)
        if stuck:
            needed = {need for _, needs in stuck.values() for need in needs}
            questions = {rank: tuple(need for need in needed if rank in may_lack[need]) for rank in stuck}
            self._round = _Round(next(self._numbers), stuck, questions)
            for rank, asked in questions.items():
                if asked:
                    self._post(rank, "asked", (self._round.number, asked))

    def _tell(self, judged: _Round) -> None:
        """Tell the ranks that are deadlocked by the answers of a round."""
        blockers = judged.blockers()
        stuck = _deadlocked(judged.stuck, blockers)
        if not stuck:
            return
        circle = _circle(stuck, blockers)
        about = _text({member: stuck[member][1] for member in circle})
        for rank, (number, needs) in stuck.items():
            if self._told.get(rank) != number:
                self._told[rank] = number
                so = "" if rank in circle else f"\nSo rank {rank} cannot go on either, which waits for {_words(needs)}."
                self._post(rank, "deadlock", (number, about + so))


def _deadlocked(stuck: Mapping[int, tuple[int, Needs]], blockers: Blockers) -> dict[int, tuple[int, Needs]]:
    """Return the largest subset of `stuck` in which each need of each rank is lacked by another rank of the subset."""
    left = dict(stuck)
    while True:
        free = [
            rank
            for rank, (_, needs) in left.items()
            if any(left.keys().isdisjoint(blockers.get(need, ())) for need in needs)
        ]
        if not free:
            return left
        for rank in free:
            del left[rank]


def _circle(stuck: Mapping[int, tuple[int, Needs]], blockers: Blockers) -> list[int]:
    """Return a shortest cycle of the wait-for graph: deadlocked ranks, each of which waits for the next one."""
    next_of = {
        rank: sorted({other for need in needs for other in blockers[need] if other in stuck})
        for rank, (_, needs) in stuck.items()
    }
    shortest: list[int] = []
    for start in stuck:
        paths = [[start]]
        seen = {start}
        while paths and not (shortest and len(paths[0]) >= len(shortest)):
            path = paths.pop(0)
            for other in next_of[path[-1]]:
                if other == start:
                    shortest, paths = path, []
                    break
                if other not in seen:
                    seen.add(other)
                    paths.append([*path, other])
        if len(shortest) == 2:
            break
    first = shortest.index(min(shortest))
    return shortest[first:] + shortest[:first]


def _words(needs: Needs) -> str:
    return " and ".join(need.text for need in needs)


def _text(circle: Mapping[int, Needs]) -> str:
    if len(circle) == 2:
        first = "two ranks wait for each other, so neither can go on:"
    else:
        first = f"{len(circle)} ranks wait for each other in a circle, each for the next, so none can go on:"
    return "\n".join([first, *(f"  rank {rank} waits for {_words(needs)}" for rank, needs in circle.items())])
