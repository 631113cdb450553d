"""Ranks that wait for each other, each for something else, so that none of them can go on: two, or a circle of any length.

Operations of one group of ranks are compared by their controller; this is about waits that no controller sees together: a
gradient exchange and an operation, exchanges of different gradients, operations of different process sets, `join` and an
exchange.

A rank is stuck if all of its threads that use hvdlite wait, and have for some time. It tells rank 0 what it needs. A rank
*lacks* what another needs if it has not done its part of it. A set of stuck ranks is deadlocked if whatever a rank of the set
needs is lacked by another rank of the set: a stuck rank does nothing but what others make it do. Rank 0 looks for such sets::

    ranks       stuck(what I need) ──►             lacks(some of these) ──►
    rank 0                            asked(these) ──►                     deadlock(who waits for whom) ──►

What rank 0 knows is old, so it asks ranks that are all stuck by what it has heard. A rank that has left its state since says so
before it answers, and is left out. So at the moment of the first question all the others were stuck at once, each in the state
that rank 0 knows, and lacked what they say. None of them can go on before another one of them does: it is true for good.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from hvdlite.topology import Members

_ROUND_LOOKS = 8
"""How often rank 0 looks for answers before it asks anew: a rank may be stopped, or dead."""


class Need(NamedTuple):
    """What a stuck rank waits for.

    Attributes:
        members: The ranks that must take part, each of them.
        operation: The key of an operation; None for an exchange of gradients.
        number: Of an operation: the plans that its controller has followed. Of an exchange: its number among those of
            the group's channel.
        text: A description for the error message.
        channel: Of an exchange: which gradients; all ranks exchange those of one channel in the same order.
    """

    members: Members
    operation: str | int | None
    number: int
    text: str
    channel: int = 0

    @property
    def place(self) -> tuple[int, bool, int]:
        """Where a rank waits: in which group, and whether in an operation there, or in which exchange."""
        return self.members.id, self.operation is not None, self.channel


Needs = tuple[Need, ...]
Post = Callable[[int, str, object], None]
"""Sends a message: to whom, its kind, and what it says."""
Blockers = Mapping[Need, Collection[int]]
"""The ranks that lack what is needed; none lacks what it needs itself."""


class DeadlockDetector:
    """One rank's part in the search.

    Args:
        rank: This rank.
        post: Sends messages; what arrives is for `receive`.
        lacks: Whether this rank has not done its part of something that others need.
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
        """Look again.

        Args:
            needs: What this rank needs to go on; empty if it is not stuck.

        Returns:
            Who waits for whom, if this rank can never go on.
        """
        if needs != self._needs:
            self._needs, self._number, self._told = needs, next(self._numbers), None
            self._post(0, "stuck", (self._number, needs))
        if self._asked is not None:
            # After this rank has said that its state is another one, if it is.
            (round_number, questions), self._asked = self._asked, None
            self._post(0, "lacks", (round_number, [self._lacks(need) for need in questions]))
        if self._search is not None:
            self._search.look()
        told, self._told = self._told, None
        return told

    def receive(self, sender: int, kind: str, content: Any) -> None:
        """A message of another rank, or of this one."""
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
    """One set of questions: what each of some stuck ranks lacks of what they need.

    Args:
        number: Of the round.
        stuck: All ranks that are asked, or may be deadlocked: the number of the state of each, and what it needs.
        questions: What each is asked about.
    """

    def __init__(self, number: int, stuck: Mapping[int, tuple[int, Needs]], questions: Mapping[int, Needs]) -> None:
        self.number = number
        self.stuck = dict(stuck)
        self.questions = questions
        self.answers: dict[int, list[bool]] = {}
        self._looks = 0

    def look(self) -> bool:
        """Look again. Returns whether it is over: all that are still in their states have answered, or it has lasted long."""
        self._looks += 1
        return self._looks > _ROUND_LOOKS or all(
            rank in self.answers for rank, asked in self.questions.items() if asked and rank in self.stuck
        )

    def blockers(self) -> Blockers:
        """Who lacks what, of those that have answered and are still in their states."""
        found: dict[Need, list[int]] = {}
        for rank, lacked in self.answers.items():
            if rank in self.stuck:
                for need, is_lacked in zip(self.questions[rank], lacked, strict=True):
                    if is_lacked:
                        found.setdefault(need, []).append(rank)
        return found


class _Search:
    """Rank 0's part: all stuck ranks, and the questions to them."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._numbers = itertools.count()
        self._stuck: dict[int, tuple[int, Needs]] = {}
        self._round: _Round | None = None
        self._is_news = False
        self._told: dict[int, int] = {}  # in which of its states a rank has been told

    def hear(self, rank: int, number: int, needs: Needs) -> None:
        """A rank is in another state than before."""
        self._is_news = True
        self._stuck.pop(rank, None)
        if needs:
            self._stuck[rank] = number, needs
        if self._round is not None:
            self._round.stuck.pop(rank, None)

    def hear_answer(self, rank: int, round_number: int, lacked: list[bool]) -> None:
        """What a rank lacks of what it has been asked about."""
        if self._round is not None and self._round.number == round_number:
            self._round.answers[rank] = lacked

    def look(self) -> None:
        """Judge the answers, or ask."""
        if self._round is not None:
            if not self._round.look():
                return
            self._tell(self._round)
            self._round = None
        if self._is_news:
            self._is_news = False
            self._ask()

    def _ask(self) -> None:
        """Ask the ranks that may be deadlocked."""
        may_lack = {}
        for need in {need for _, needs in self._stuck.values() for need in needs}:
            # Who waits at the same place is in the same exchange, or it is their controller's business.
            there = {rank for rank in need.members.ranks if rank in self._stuck}
            may_lack[need] = {rank for rank in there if all(own.place != need.place for own in self._stuck[rank][1])}
        stuck = _deadlocked(self._stuck, may_lack)
        if stuck:
            needed = {need for _, needs in stuck.values() for need in needs}
            questions = {rank: tuple(need for need in needed if rank in may_lack[need]) for rank in stuck}
            self._round = _Round(next(self._numbers), stuck, questions)
            for rank, asked in questions.items():
                if asked:
                    self._post(rank, "asked", (self._round.number, asked))

    def _tell(self, judged: _Round) -> None:
        """Tell all ranks that are deadlocked."""
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
    """The largest part of `stuck` of which each rank's needs are all lacked by others of that part."""
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
    """A shortest circle of deadlocked ranks each of which waits for the next one."""
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
