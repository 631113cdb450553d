"""The owner of every wait: one quiet thread per rank that knows who waits, asks who is missing, and says so.

A wait that lasts is entered here. Four times a second the thread looks: has a rank that the wait needs left the job?
Then the wait can never end, and fails. Has it lasted longer than the limit? Then each rank concerned is asked where it
is, and the lowest waiting rank (rank 0 itself may be missing) prints the answers with the stacks of those that are missing.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from hvdlite.config import Config
from hvdlite.errors import CommunicationError, HvdliteError, MismatchError, PeerLeftError, ranks_text
from hvdlite.protocols import Transport, WaitKind
from hvdlite.watchdog.deadlock import DeadlockDetector, Need, Needs
from hvdlite.watchdog.stall_report import Answer, is_in_messages, last_words, left_text, report, reporter, stack_of
from hvdlite.watchdog.threads import Threads

_PERIOD = 0.25
_ANSWER_SECONDS = 1.0
_LEFT_SECONDS = 1.0
"""A wait that still lasts so long after a peer's goodbye is one that the peer had no part in."""
_BUSY_SECONDS = 30.0
"""How long a wait that was given up may take to notice. It does when it has finished what it does, such as copying."""
_GAVE_UP_SECONDS = 5.0
"""How long a rank that has given up a wait stays, at its end, for those that it has waited for."""
_SUSPENDED_SECONDS = 5.0
"""If the thread did not run for so long, the process was stopped; that time is nobody's wait."""


@dataclass(slots=True)
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
    need: Callable[[], Need | None] | None = None
    """Gives what the other ranks must do; None if that is not known for certain."""
    thread: int = field(default_factory=threading.get_ident)
    link: Link | None = None
    """Where it waits, if its ranks may get out of step there."""
    kind: WaitKind = WaitKind.PEER
    one_of: tuple[int, ...] = ()
    """World ranks of which any one can end the wait, if not all of `ranks` must take part."""
    failed: tuple[float, HvdliteError] | None = None
    """When and why it was given up. It may go on nevertheless, inside of a library that nothing interrupts."""


class Link:
    """One rank's end of what ranks do in step: all of them do the same there, in the same order, or none can go on.

    Args:
        watch: Carries the news.
        ranks: The world ranks.
        channel: Tells apart what the same ranks have; the same number on all of them.
        interrupt: Ends with an error what is under way there; called from any thread.

    Attributes:
        failure: Why nothing more can be done there; None if all is well.
    """

    def __init__(
        self, watch: Watchdog, ranks: Sequence[int], channel: int, interrupt: Callable[[HvdliteError], None]
    ) -> None:
        self._watch, self.ranks, self.channel, self._interrupt = watch, tuple(ranks), channel, interrupt
        self.failure: HvdliteError | None = None

    def check(self) -> None:
        """Raise why nothing more can be done."""
        if self.failure is not None:
            raise type(self.failure)(str(self.failure))

    def fail(self, error: HvdliteError) -> None:
        """Nothing more can be done here."""
        if self.failure is None:
            self.failure = error
            self._watch.has_failed(self, error)
            self._interrupt(error)

    def break_off(self, what: str, error: BaseException) -> None:
        """This rank has left `what` in the middle, by `error`: tell the others at once, who wait for it there."""
        if self.failure is None:
            reason = f"{type(error).__name__}: {str(error) or 'no reason given'}"
            self._watch.tell_failure(self, f"has failed in {what}: {reason}")
            self.fail(
                CommunicationError(
                    f"this rank has left {what} in the middle ({reason}), so it is not in step with the others any more."
                )
            )

    def give_up(self, error: HvdliteError) -> None:
        """As `fail`, on all ranks."""
        if self.failure is None:
            self._watch.tell_failure(self, f"has given up:\n{error}")
            self.fail(error)


class LaunchedWork(Protocol):
    """What goes on on a GPU after the calls that began it have returned: `hvdlite.gpu.collectives.DeviceCollectives`."""

    @property
    def launched(self) -> int:
        """How many calls there have been."""
        ...

    def look(self) -> None:
        """Find out whether something has failed, and if so end it."""
        ...

    def fail(self, error: HvdliteError) -> None:
        """End all that goes on."""
        ...


Group = tuple[tuple[int, ...], int]
"""The ranks of a group, and how many times something was made for these ranks before: a name that all of them know."""


@dataclass
class _Question:
    """A report being gathered."""

    wait: Wait
    asked: float
    answers: dict[int, Answer] = field(default_factory=dict)


class Exchanging:
    """For with statements, one after the other: it stands around every exchange, so it is made once and does little.

    Args:
        watch, what, ranks, remember, channel, link: See `Watchdog.exchanging`.
    """

    __slots__ = ("_channel", "_link", "_number", "_ranks", "_remember", "_watch", "_what")

    def __init__(
        self,
        watch: Watchdog,
        what: Callable[[], str],
        ranks: Sequence[int],
        remember: bool,
        channel: int,
        link: Link | None,
    ) -> None:
        self._watch, self._what, self._ranks, self._remember = watch, what, tuple(ranks), remember
        self._channel, self._link = channel, link

    def __enter__(self) -> None:
        watch, link = self._watch, self._link
        if link is None:
            wait = Wait(self._what, self._ranks, watch.fail)
        else:
            if link.failure is not None:
                link.check()
            wait = Wait(self._what, self._ranks, link.fail, link=link)
        if self._remember:
            wait.need = partial(self._need, watch.begin_exchange(self._ranks, self._channel))
        elif self._channel:
            wait.need = lambda: self._need(watch.exchanges_begun(self._ranks, self._channel))
        self._number = watch.begin(wait)

    def _need(self, number: int) -> Need:
        return Need(self._ranks, None, number, self._what(), self._channel)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._watch.end(self._number)
        # Our own errors are raised on all ranks alike. Others (no memory, Ctrl-C) leave the rest waiting inside.
        if error is not None and self._link is not None and not isinstance(error, HvdliteError):
            self._link.break_off(self._what(), error)
        if self._remember and kind is None:
            text = self._what()
            self._watch.completed(lambda: text)


class Watchdog:
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
        self.users = Threads()
        """The threads of the program that use hvdlite."""
        self.users.add()
        self.lacks: dict[tuple[int, ...], Callable[[str | int, int], bool]] = {}
        """By the ranks of each engine: `DeadlockDetector`'s question, of an operation's key and number."""
        self._exchanges: dict[tuple[tuple[int, ...], int], int] = {}  # of gradients, begun; by channel
        self._channels: dict[tuple[int, ...], int] = {}
        self._is_searching = False
        """The ranks find out who waits for whom."""
        self._deadlocks = DeadlockDetector(transport.rank, self._post, self._lacks)
        self._waits: dict[int, Wait] = {}
        self._numbers = itertools.count()
        self._completed: tuple[Callable[[], str], float] | None = None
        self._questions: dict[int, _Question] = {}
        self._left: dict[int, float] = {}
        self._farewells: dict[int, str] = {}
        self._launches: dict[Group, LaunchedWork] = {}
        self._made: dict[tuple[int, ...], int] = {}
        self._launched_by: dict[int, Mapping[Group, int]] = {}  # what the ranks that have left had launched
        self._links: WeakValueDictionary[tuple[tuple[int, ...], int], Link] = WeakValueDictionary()
        self._failed: dict[tuple[tuple[int, ...], int], str] = {}  # of links that are not there yet
        self._gave_up = False
        self._stopped = False
        self._wake = threading.Event()
        self._all_left = threading.Event()
        self._thread: threading.Thread | None = None
        if transport.size > 1:
            self._thread = threading.Thread(target=self._run, name="hvdlite-watch", daemon=True)
            self._thread.start()

    def new_channel(self, ranks: Sequence[int]) -> int:
        """A number for exchanges of the same gradients. All of these ranks call this, in the same order."""
        number = self._channels[tuple(ranks)] = self._channels.get(tuple(ranks), 0) + 1
        return number

    def link(self, ranks: Sequence[int], channel: int, interrupt: Callable[[HvdliteError], None]) -> Link:
        """A new `Link`; arguments as there. It takes the place of an earlier one of the same ranks and channel."""
        link = Link(self, ranks, channel, interrupt)
        self._links[link.ranks, channel] = link
        if (text := self._failed.pop((link.ranks, channel), None)) is not None:
            link.fail(PeerLeftError(text))
        return link

    def has_failed(self, link: Link, error: HvdliteError) -> None:
        """Whoever waits at this link should soon wait no more."""
        for wait in list(self._waits.values()):
            if wait.link is link:
                wait.failed = wait.failed or (time.monotonic(), error)

    def tell_failure(self, link: Link, text: str) -> None:
        """Tell the other ranks of a link that this rank is out of step there; `text` goes on after "rank 3 ..."."""
        for rank in link.ranks:
            if rank != self._transport.rank:
                self._transport.post(pickle.dumps(("failed", link.ranks, link.channel, text)), rank)

    def _hear_failure(self, sender: int, ranks: tuple[int, ...], channel: int, text: str) -> None:
        text = f"rank {sender} {text}\nThis rank needs it there, so it cannot go on either."
        link = self._links.get((ranks, channel))
        if link is None:
            self._failed[ranks, channel] = text
        else:
            link.fail(PeerLeftError(text))

    def exchanging(
        self,
        what: Callable[[], str],
        ranks: Sequence[int],
        remember: bool = True,
        channel: int = 0,
        link: Link | None = None,
    ) -> Exchanging:
        """Watch the body, which is inside of a collective.

        Args:
            what: What is done there, in words.
            ranks: The world ranks that must take part.
            remember: It is an exchange of its own, not part of an operation: call `completed` at its end. All ranks make the
                same such exchanges, in the same order.
            channel: What `new_channel` gave for these gradients. If not `remember`: this thread waits for another one of its
                rank, which exchanges them.
            link: Where it happens. Without one no exception reaches the body, so that it can only end with the job.
        """
        return Exchanging(self, what, ranks, remember, channel, link)

    def completed(self, what: Callable[[], str]) -> None:
        """This rank has completed `what` (in words, asked for later if at all): reports name the latest."""
        self._completed = (what, time.monotonic())

    def launches_on(self, ranks: Sequence[int], launches: LaunchedWork) -> Callable[[], None]:
        """Watch what a group launches on its GPUs. All its ranks call this, in the same order.

        Nobody waits for a launch here, so a rank that leaves says how many it has made: what another has made beyond that can
        never end.

        Args:
            ranks: The world ranks that must take part.
            launches: This rank's end.

        Returns:
            What ends this.
        """
        group = tuple(ranks), self._made.get(tuple(ranks), 0)
        self._made[group[0]] = group[1] + 1
        self._launches[group] = launches
        return lambda: self._forget(group)

    def _forget(self, group: Group) -> None:
        self._launches.pop(group, None)

    def _check_launches(self) -> None:
        for group, launches in list(self._launches.items()):
            launches.look()
            for rank in group[0]:
                if launches.launched > self._launched_by.get(rank, {}).get(group, launches.launched):
                    launches.fail(
                        PeerLeftError(f"rank {rank} has left the job, and this rank needs it for what it has launched.")
                    )

    def fail(self, error: HvdliteError) -> None:
        """End the job, since a wait within a collective can never end."""
        self._end_job(str(error))

    def exchanges_begun(self, ranks: Sequence[int], channel: int) -> int:
        """How many exchanges of a channel this rank has begun."""
        return self._exchanges.get((tuple(ranks), channel), 0)

    def begin_exchange(self, ranks: tuple[int, ...], channel: int) -> int:
        """This thread begins an exchange of gradients. Returns how many there have been among `ranks` in `channel`."""
        self.users.add()
        number = self._exchanges[ranks, channel] = self._exchanges.get((ranks, channel), 0) + 1
        return number

    def begin(self, wait: Wait) -> int:
        """Start to watch `wait`. Returns its number, for `end`."""
        wait.next_report = wait.since + self._config.stall_check_time_seconds
        number = next(self._numbers)
        self._waits[number] = wait
        return number

    def end(self, number: int) -> None:
        """The wait is over."""
        del self._waits[number]

    def leave(self, how: str) -> None:
        """Say goodbye to the other ranks, and stay to answer them until all have said it.

        Args:
            how: Why this rank leaves, for their messages, such as "it has come to the end of its program".
        """
        if self._thread is None:
            return
        launched = {group: launches.launched for group, launches in list(self._launches.items())}
        farewell = f"{how} {last_words(self._last())}"
        for rank in range(self._transport.size):
            self._transport.post(pickle.dumps(("left", launched, farewell)), rank)
        self._wake.set()
        patience = _GAVE_UP_SECONDS if self._gave_up else float("inf")
        began = time.monotonic()
        while not self._all_left.wait(1.0):
            if not self._thread.is_alive():
                return
            if time.monotonic() > began + patience:
                missing = sorted(set(range(self._transport.size)) - set(self._left))
                self._end_job(
                    f"this rank has given up a wait before, and {ranks_text(missing)} did not come to an end since."
                )
        self.abandon()
        self._thread.join()

    def become_child(self, error: HvdliteError) -> None:
        """This process was forked from the rank: whoever begins an exchange in it gets `error`."""
        self._waits.clear()
        for link in list(self._links.values()):
            link.failure = error

    def abandon(self) -> None:
        """Stop without goodbye: the job is over already."""
        self._stopped = True
        self._wake.set()

    def _run(self) -> None:
        try:
            self._look_after()
        except PeerLeftError:
            return  # a transport that is being torn down: whoever waits on it is told by the transport itself
        except BaseException:  # nobody would be told any more who is missing, nor that all have left
            self._end_job(f"the thread that watches over the waits of this rank has failed:\n{traceback.format_exc()}")

    def _look_after(self) -> None:
        period = _PERIOD
        before = time.monotonic()
        while not self._stopped:
            if self._wake.wait(period):  # leaving: the last goodbyes are due soon, so look more often for a while
                self._wake.clear()
                period = _PERIOD / 256
            period = min(2 * period, _PERIOD)
            self._is_searching = False
            self._read_letters()
            now = time.monotonic()
            if now - before > _SUSPENDED_SECONDS:
                self._forgive(now - before)
            before = now
            self._look(now)
            if self._is_searching:  # so more is to come
                period = _PERIOD / 16

    def _look(self, now: float) -> None:
        # A method of its own, for a loop's variable would keep the last wait, and the memory of its exchange with it.
        self._check_launches()
        for wait in list(self._waits.values()):
            self._check(wait, now)
        if (text := self._deadlocks.look(self._needs(now))) is not None:
            for wait in list(self._waits.values()):
                wait.fail(MismatchError(text))
        for number, question in list(self._questions.items()):
            if len(question.answers) == len(question.wait.ranks) or now > question.asked + _ANSWER_SECONDS:
                del self._questions[number]
                self._report(question, now)

    def _read_letters(self) -> None:
        while (received := self._transport.poll()) is not None:
            sender, letter = received
            kind, *content = pickle.loads(letter)
            if kind == "left":
                self._left[sender] = time.monotonic()
                self._launched_by[sender], self._farewells[sender] = content
                if len(self._left) == self._transport.size:
                    self._all_left.set()
            elif kind == "failed":
                self._hear_failure(sender, *content)
            elif kind == "where":
                self._transport.post(pickle.dumps(("here", content[0], self._where())), sender)
            elif kind == "here":
                number, answer = content
                if number in self._questions:
                    self._questions[number].answers[sender] = answer
            elif kind in DeadlockDetector.KINDS:
                self._is_searching = True
                self._deadlocks.receive(sender, kind, content[0])

    def _post(self, dest: int, kind: str, content: object) -> None:
        self._is_searching = True
        self._transport.post(pickle.dumps((kind, content)), dest)

    def _needs(self, now: float) -> Needs:
        """What this rank needs to go on, if it is stuck; empty if not, or if that is not certain."""
        waits = list(self._waits.values())
        if not waits or any(now < wait.since + self._config.deadlock_time_seconds for wait in waits):
            return ()
        if not self.users.are_all_among({wait.thread for wait in waits}):
            return ()  # a thread that may do what the others wait for
        needs = [None if wait.need is None else wait.need() for wait in waits]
        return () if None in needs else tuple(dict.fromkeys(need for need in needs if need is not None))

    def _lacks(self, need: Need) -> bool:
        """Whether this rank has not done its part of what another needs."""
        if need.operation is None:
            begun = self._exchanges.get((need.ranks, need.channel), 0)
            return self._transport.rank in need.ranks and begun < need.number
        lacks = self.lacks.get(need.ranks)
        return lacks is not None and lacks(need.operation, need.number)

    def _where(self) -> Answer:
        now = time.monotonic()
        waits = tuple((wait.what(), now - wait.since) for wait in list(self._waits.values()))
        return Answer(waits, stack_of(self._main_thread), self._last())

    def _last(self) -> tuple[str, float] | None:
        completed = self._completed
        return None if completed is None else (completed[0](), time.monotonic() - completed[1])

    def _forgive(self, seconds: float) -> None:
        """The process was stopped for so long: by Ctrl-Z, or with its machine."""
        for wait in list(self._waits.values()):
            wait.since += seconds
            wait.next_report += seconds

    def _check(self, wait: Wait, now: float) -> None:
        if wait.failed is not None:
            since, error = wait.failed
            if now > since + (_LEFT_SECONDS if is_in_messages(wait.thread) else _BUSY_SECONDS):
                self._end_job(str(error))
            return
        needed = wait.one_of or wait.ranks
        gone = [rank for rank in needed if now > max(self._left.get(rank, now), wait.since) + _LEFT_SECONDS]
        if gone and (not wait.one_of or len(gone) == len(needed)):
            error = PeerLeftError(left_text(gone[0], wait.what(), self._farewells[gone[0]]))
            wait.failed = now, error
            wait.fail(error)
            return
        if not self._config.stall_check_disable and wait.kind is not WaitKind.SERVICE:
            limit = self._config.stall_shutdown_time_seconds
            if now > wait.next_report or 0 < limit < now - wait.since:
                wait.next_report = now + self._config.stall_check_time_seconds
                if all(question.wait is not wait for question in self._questions.values()):
                    number = next(self._numbers)
                    self._questions[number] = _Question(wait, now)
                    for rank in wait.ranks:
                        self._transport.post(pickle.dumps(("where", number)), rank)

    def _report(self, question: _Question, now: float) -> None:
        wait, what = question.wait, question.wait.what()
        end_after = self._config.stall_shutdown_time_seconds
        limit = self._config.stall_check_time_seconds
        if self._transport.rank != reporter(what, question.answers, min(limit, end_after) if end_after > 0 else limit):
            return  # over meanwhile, or another rank's to report
        text = report(self._transport.rank, what, now - wait.since, wait.ranks, question.answers, self._left)
        if 0 < end_after < now - wait.since:
            text = f"{text}\nIt waits no longer: the limit for one wait is {end_after:g} s."
            if wait.link is None:
                self._end_job(text)
            else:
                self._gave_up = True
                wait.link.give_up(CommunicationError(text))
        else:
            print(text, file=sys.stderr, flush=True)
