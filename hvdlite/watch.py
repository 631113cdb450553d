"""The owner of every wait: one quiet thread per rank that knows who waits, asks who is missing, and says so.

A wait that lasts is entered here. Four times a second the thread looks: has a rank that the wait needs left the job?
Then the wait can never end, and fails. Has it lasted longer than the limit? Then each rank concerned is asked where it
is, and the lowest waiting rank prints the answers with the stacks of those that are missing.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hvdlite.config import Config
from hvdlite.errors import HvdliteError, PeerLeftError
from hvdlite.protocols import Transport

_PERIOD = 0.25
_ANSWER_SECONDS = 1.0
_LEFT_SECONDS = 1.0
"""A wait that still lasts so long after a peer's goodbye is one that the peer had no part in."""


@dataclass
class Wait:
    """One wait of this rank.

    Attributes:
        what: What for, in words.
        ranks: The world ranks that must take part.
        fail: Ends the wait with an error; called from the watch's thread.
        since: When it began (`time.monotonic`).
    """

    what: Callable[[], str]
    ranks: Sequence[int]
    fail: Callable[[HvdliteError], None]
    since: float = field(default_factory=time.monotonic)
    next_report: float = 0.0


@dataclass
class _Question:
    """A report being gathered."""

    wait: Wait
    asked: float
    answers: dict[int, tuple[str | None, str]] = field(default_factory=dict)


class _Exchanging:
    """For a with statement: a plain class, for it stands around every exchange, and generators cost a microsecond more."""

    __slots__ = ("_number", "_ranks", "_watch", "_what")

    def __init__(self, watch: Watch, what: Callable[[], str], ranks: Sequence[int]) -> None:
        self._watch, self._what, self._ranks = watch, what, ranks

    def __enter__(self) -> None:
        self._number = self._watch.begin(Wait(self._what, self._ranks, self._watch.fail))

    def __exit__(self, *_: object) -> None:
        self._watch.end(self._number)


class Watch:
    """Watches the waits of one rank.

    Args:
        transport: Carries questions and answers over all ranks of the job; nobody else may post on it.
        config: Its stall settings.
        end_job: Ends the whole job with an error text.
    """

    def __init__(self, transport: Transport, config: Config, end_job: Callable[[str], None]) -> None:
        self._transport = transport
        self._config = config
        self._end_job = end_job
        self._main_thread = threading.get_ident()
        self._waits: dict[int, Wait] = {}
        self._numbers = itertools.count()
        self._questions: dict[int, _Question] = {}
        self._left: dict[int, float] = {}
        self._stopped = False
        self._wake = threading.Event()
        self._all_left = threading.Event()
        self._thread: threading.Thread | None = None
        if transport.size > 1:
            self._thread = threading.Thread(target=self._run, name="hvdlite-watch", daemon=True)
            self._thread.start()

    def exchanging(self, what: Callable[[], str], ranks: Sequence[int]) -> _Exchanging:
        """Watch the body, which is inside of a collective: no exception reaches it there, so it can only end with the job."""
        return _Exchanging(self, what, ranks)

    def fail(self, error: HvdliteError) -> None:
        """End the job, since a wait within a collective can never end."""
        self._end_job(str(error))

    def begin(self, wait: Wait) -> int:
        """Start to watch `wait`. Returns its number, for `end`."""
        wait.next_report = wait.since + self._config.stall_check_time_seconds
        number = next(self._numbers)
        self._waits[number] = wait
        return number

    def end(self, number: int) -> None:
        """The wait is over."""
        del self._waits[number]

    def leave(self) -> None:
        """Say goodbye to the other ranks, and stay to answer them until all have said it."""
        if self._thread is None:
            return
        for rank in range(self._transport.size):
            self._transport.post(pickle.dumps(("left",)), rank)
        self._wake.set()
        while not self._all_left.wait(1.0):
            if not self._thread.is_alive():
                return
        self.abandon()
        self._thread.join()

    def abandon(self) -> None:
        """Stop without goodbye: the job is over already."""
        self._stopped = True
        self._wake.set()

    def _run(self) -> None:
        period = _PERIOD
        try:
            while not self._stopped:
                if self._wake.wait(period):  # leaving: the last goodbyes are due soon, so look more often for a while
                    self._wake.clear()
                    period = _PERIOD / 256
                period = min(2 * period, _PERIOD)
                self._read_letters()
                now = time.monotonic()
                for wait in list(self._waits.values()):
                    self._check(wait, now)
                for number, question in list(self._questions.items()):
                    if len(question.answers) == len(question.wait.ranks) or now > question.asked + _ANSWER_SECONDS:
                        del self._questions[number]
                        self._report(question, now)
        except PeerLeftError:
            return  # a transport that is being torn down: whoever waits on it is told by the transport itself

    def _read_letters(self) -> None:
        while (received := self._transport.poll()) is not None:
            sender, letter = received
            kind, *content = pickle.loads(letter)
            if kind == "left":
                self._left[sender] = time.monotonic()
                if len(self._left) == self._transport.size:
                    self._all_left.set()
            elif kind == "where":
                waits = [wait.what() for wait in list(self._waits.values())]
                answer = ("here", content[0], waits[0] if waits else None, self._stack())
                self._transport.post(pickle.dumps(answer), sender)
            elif kind == "here":
                number, waiting_for, stack = content
                if number in self._questions:
                    self._questions[number].answers[sender] = (waiting_for, stack)

    def _check(self, wait: Wait, now: float) -> None:
        for rank in wait.ranks:
            if now > self._left.get(rank, now) + _LEFT_SECONDS and now > wait.since + _LEFT_SECONDS:
                wait.fail(PeerLeftError(f"rank {rank} has left the job, and this rank still waits for {wait.what()}."))
                return
        if not self._config.stall_check_disable:
            limit = self._config.stall_shutdown_time_seconds
            if now > wait.next_report or 0 < limit < now - wait.since:
                wait.next_report = now + self._config.stall_check_time_seconds
                if all(question.wait is not wait for question in self._questions.values()):
                    number = next(self._numbers)
                    self._questions[number] = _Question(wait, now)
                    for rank in wait.ranks:
                        self._transport.post(pickle.dumps(("where", number)), rank)

    def _report(self, question: _Question, now: float) -> None:
        waiting = [rank for rank, (what, _) in question.answers.items() if what is not None]
        if self._transport.rank != min(waiting, default=-1):
            return  # over meanwhile, or another rank's to print
        wait = question.wait
        seconds = now - wait.since
        lines = [f"hvdlite: rank {self._transport.rank} has waited {seconds:.0f} s for {wait.what()}."]
        for rank in wait.ranks:
            if rank in self._left:
                lines.append(f"  rank {rank} has left the job.")
            elif rank not in question.answers:
                lines.append(f"  rank {rank} does not answer: it is stopped, or busy in code that holds Python's lock.")
            elif question.answers[rank][0] is not None:
                lines.append(f"  rank {rank} waits for {question.answers[rank][0]}")
            else:
                lines.append(f"  rank {rank} is missing; it is here:\n{question.answers[rank][1]}")
        limit = self._config.stall_shutdown_time_seconds
        if 0 < limit < seconds:
            self._end_job("\n".join([*lines, f"The job is ended: the limit for one wait is {limit:g} s."]))
        else:
            print("\n".join(lines), file=sys.stderr, flush=True)

    def _stack(self) -> str:
        """Where the thread that started hvdlite is, innermost call last, without our own frames."""
        frame = sys._current_frames().get(self._main_thread)
        frames = [entry for entry in traceback.extract_stack(frame) if not entry.filename.startswith(_PACKAGE)]
        return "".join("    " + line for line in traceback.StackSummary.from_list(frames[-6:]).format())


_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
