"""Reports waits that have lasted too long: asks all ranks concerned where they are; one of these prints the answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hvdlite.config import Config
from hvdlite.launcher_link.link import report_hung, stack_by_guard
from hvdlite.ranks.log import tell
from hvdlite.watchdog.stall_report import StallAnswer, report, reporter
from hvdlite.watchdog.waits import Wait

_ANSWER_SECONDS = 1.0
_SILENT = 4
"""Of so many ranks that do not answer at most, the guards are asked where they are: this takes a moment each."""


@dataclass
class _Question:
    """A question to the ranks of a wait, and the answers so far."""

    wait: Wait
    asked: float
    answers: dict[int, StallAnswer] = field(default_factory=dict)


class Stalls:
    """Reports the waits of one rank that last too long.

    Args:
        rank: This rank.
        config: The configuration, with the stall settings.
        tell: ``tell(rank, kind, *content)`` sends a control message. Whoever receives an answer hands it to `hear`.
        give_up: Ends a wait that has reached its limit, with a text and the ranks that hang.
        stack_of: Returns the stack of a rank that does not answer; empty if it is not known.
    """

    def __init__(
        self,
        rank: int,
        config: Config,
        tell: Callable[..., None],
        give_up: Callable[[Wait, str, Sequence[int]], None],
        stack_of: Callable[[int], str],
    ) -> None:
        self._rank, self._tell, self._give_up, self._stack_of = rank, tell, give_up, stack_of
        self._enabled = not config.stall_check_disable
        self._report_after, self._end_after = config.stall_check_time_seconds, config.stall_shutdown_time_seconds
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count()

    def check(self, wait: Wait, now: float) -> None:
        """Ask the ranks of a wait where they are, if the wait has lasted long enough."""
        if not self._enabled or not (now > wait.next_report or 0 < self._limit(wait) < now - wait.since):
            return
        wait.next_report = now + self._report_after
        if all(question.wait is not wait for question in self._questions.values()):
            number = next(self._numbers)
            self._questions[number] = _Question(wait, now)
            for rank in wait.members.ranks:
                self._tell(rank, "where", number, wait.letter)

    def _limit(self, wait: Wait) -> float:
        return self._end_after if wait.limit is None else wait.limit

    def hear(self, sender: int, number: int, answer: StallAnswer) -> None:
        """Take the answer of a rank: where it is."""
        if number in self._questions:
            self._questions[number].answers[sender] = answer

    def look(self, now: float, left: Mapping[int, float]) -> None:
        """Report the waits whose ranks have all answered, or have had enough time to answer.

        Args:
            now: The time of `time.monotonic`.
            left: The ranks that have left the job, with the time at which each did.
        """
        for number, question in list(self._questions.items()):
            if len(question.answers) == question.wait.members.size or now > question.asked + _ANSWER_SECONDS:
                del self._questions[number]
                self._report(question, now, left)

    def _report(self, question: _Question, now: float, left: Mapping[int, float]) -> None:
        wait, what = question.wait, question.wait.what()
        report_after, end_after = self._report_after, self._limit(wait)
        shortest = min(report_after, end_after) if end_after > 0 else report_after
        if self._rank != reporter(what, question.answers, shortest):
            return  # over meanwhile, or another rank's to report
        ranks, answers = wait.members.ranks, question.answers
        silent = [rank for rank in ranks if rank not in answers and rank not in left]
        stacks = {rank: self._stack_of(rank) for rank in silent[:_SILENT]}
        text = report(self._rank, what, now - wait.since, ranks, answers, left, stacks)
        if 0 < end_after < now - wait.since:
            hung = [*silent, *(rank for rank, answer in answers.items() if rank not in left and answer.is_missing)]
            self._give_up(wait, f"{text}\nIt waits no longer: the limit for one wait is {end_after:g} s.", hung)
        else:
            tell("stalls", text, self._rank)


class Informer:
    """Speaks with the launcher of one rank, if there is one.

    Args:
        config: The configuration.
        job_ranks: For each rank, the number by which the launcher knows it.
    """

    def __init__(self, config: Config, job_ranks: Sequence[int]) -> None:
        self._control, self._ranks = config.control, job_ranks

    def stack_of(self, rank: int) -> str:
        """Return the stacks of a rank that does not answer; empty if they are not known."""
        return stack_by_guard(self._control, self._ranks[rank], len(self._ranks))

    def has_failed(self, hung: Sequence[int], text: str) -> bool:
        """Say that ranks hang, with the report. Return whether the launcher acts on it: it ends them."""
        size = len(self._ranks)
        return any([report_hung(self._control, self._ranks[rank], size, text) for rank in hung])
