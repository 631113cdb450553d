"""Waits that have lasted too long: a rank asks all ranks concerned where they are, and one of them prints the answers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdlite.config import Config
from hvdlite.watchdog.stall_report import Answer, report, reporter
from hvdlite.watchdog.waits import Wait

_ANSWER_SECONDS = 1.0


@dataclass
class _Question:
    """A question to the ranks of a wait, and the answers so far."""

    wait: Wait
    asked: float
    answers: dict[int, Answer] = field(default_factory=dict)


class Stalls:
    """The reports of one rank about its long waits.

    Args:
        rank: The number of this rank.
        config: The settings of the stall check.
        tell: A function that sends a message: called with the receiver, the kind, and the content. Answers go to `hear`.
        give_up: A function that ends a wait at its time limit. It is called with the wait and a text.
    """

    def __init__(
        self, rank: int, config: Config, tell: Callable[..., None], give_up: Callable[[Wait, str], None]
    ) -> None:
        self._rank, self._tell, self._give_up = rank, tell, give_up
        self._enabled = not config.stall_check_disable
        self._report_after, self._end_after = config.stall_check_time_seconds, config.stall_shutdown_time_seconds
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count()

    def check(self, wait: Wait, now: float) -> None:
        """Ask the ranks that a wait needs where they are, if the wait has lasted long enough."""
        if not self._enabled or not (now > wait.next_report or 0 < self._end_after < now - wait.since):
            return
        wait.next_report = now + self._report_after
        if all(question.wait is not wait for question in self._questions.values()):
            number = next(self._numbers)
            self._questions[number] = _Question(wait, now)
            for rank in wait.members.ranks:
                self._tell(rank, "where", number)

    def hear(self, sender: int, number: int, answer: Answer) -> None:
        """Record the answer of a rank (this one too) to question `number`."""
        if number in self._questions:
            self._questions[number].answers[sender] = answer

    def look(self, now: float, left: Mapping[int, float]) -> None:
        """Report each wait whose question has all its answers, or has waited long enough for them.

        Args:
            now: The time by `time.monotonic`, in seconds.
            left: For each rank that has left the job the time at which it left.
        """
        for number, question in list(self._questions.items()):
            if len(question.answers) == question.wait.members.size or now > question.asked + _ANSWER_SECONDS:
                del self._questions[number]
                self._report(question, now, left)

    def _report(self, question: _Question, now: float, left: Mapping[int, float]) -> None:
        wait, what = question.wait, question.wait.what()
        limit, end_after = self._report_after, self._end_after
        if self._rank != reporter(what, question.answers, min(limit, end_after) if end_after > 0 else limit):
            return  # the wait is over, or another rank reports it
        text = report(self._rank, what, now - wait.since, wait.members.ranks, question.answers, left)
        if 0 < end_after < now - wait.since:
            self._give_up(wait, f"{text}\nIt waits no longer: the limit for one wait is {end_after:g} s.")
        else:
            print(text, file=sys.stderr, flush=True)
