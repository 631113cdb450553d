"""The watchdog owns every wait of a rank. It is one quiet thread that finds out which rank is missing, and says so.

Whoever waits for other ranks registers the wait with the watchdog. Four times a second its thread looks at each wait. If a rank
that the wait needs has left the job, the wait can never end, and fails. If the wait has lasted longer than the limit, the
watchdog asks each rank concerned where it is; then the lowest waiting rank (rank 0 itself may be missing) prints the answers,
with the stacks of the ranks that are missing.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from hvdlite.config import Config
from hvdlite.errors import CommunicationError, HvdliteError, MismatchError, PeerLeftError, ranks_text
from hvdlite.protocols import Transport, WaitKind
from hvdlite.ranks.topology import Members
from hvdlite.watchdog.deadlock import DeadlockDetector, Need, Needs
from hvdlite.watchdog.departures import Departures, LostRanks
from hvdlite.watchdog.launched import LaunchWatch
from hvdlite.watchdog.letters import Letter
from hvdlite.watchdog.links import Link, Links
from hvdlite.watchdog.stall_report import StallAnswer, is_in_messages, last_words, left_text, stack_of_program
from hvdlite.watchdog.stalls import Informer, Stalls
from hvdlite.watchdog.threads import Threads
from hvdlite.watchdog.waits import Wait, of_program

_PERIOD = 0.25
_LEFT_SECONDS = 1.0
"""If a wait still lasts so long after a peer has left, the peer did not take part in it before it left."""
_BUSY_SECONDS = 30.0
"""How long a wait that was given up may go on: it ends when its thread has finished what it does, such as copying."""
_GAVE_UP_SECONDS = 5.0
"""How long a rank that has given up a wait stays at its end, until the ranks for which it has waited leave too."""
_SUSPENDED_SECONDS = 5.0
"""If the watchdog's thread did not run for so long, the process was stopped. That time does not count as waiting."""


class WaitGuard:
    """The context manager of `Watchdog.guarded`.

    It may be used in several with statements, one after the other. It stands around every exchange, so it does little.
    """

    __slots__ = ("_channel", "_limit", "_link", "_members", "_number", "_remember", "_watch", "_what")

    def __init__(
        self,
        watch: Watchdog,
        what: Callable[[], str],
        members: Members,
        remember: bool,
        channel: int,
        link: Link | None,
        limit: float | None,
    ) -> None:
        self._watch, self._what, self._members, self._remember = watch, what, members, remember
        self._channel, self._link, self._limit = channel, link, limit

    def __enter__(self) -> None:
        watch, link = self._watch, self._link
        if link is None:
            wait = Wait(self._what, self._members, watch.fail)
        else:
            if link.failure is not None:
                link.check()
            wait = Wait(self._what, self._members, link.fail, link=link, limit=self._limit)
        if self._remember:
            wait.need = partial(self._need, watch.begin_exchange(self._members, self._channel))
        elif self._channel:
            wait.need = lambda: self._need(watch.exchanges_begun(self._members, self._channel))
        self._number = watch.begin(wait)

    def _need(self, number: int) -> Need:
        return Need(self._members, None, number, self._what(), self._channel)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._watch.end(self._number)
        # All ranks raise hvdlite's errors alike. After other errors (no memory, Ctrl-C) the other ranks still wait inside.
        if error is not None and self._link is not None and not isinstance(error, HvdliteError):
            self._link.break_off(self._what(), error)
        if self._remember and kind is None:
            text = self._what()
            self._watch.completed(lambda: text)


class Watchdog:
    """Watches the waits of one rank.

    Args:
        transport: A transport over all ranks of the job, for the watchdog's control messages. Nobody else may post on it.
        config: The configuration, with the stall settings.
        end_job: Ends the whole job with an error text.
        job_ranks: For each rank, the number by which the launcher knows it; None if that is the same.
    """

    def __init__(
        self,
        transport: Transport,
        config: Config,
        end_job: Callable[[str], None],
        job_ranks: Sequence[int] | None = None,
    ) -> None:
        self._transport = transport
        self._informer = Informer(config, range(transport.size) if job_ranks is None else job_ranks)
        self._config = config
        self._end_job = end_job
        self._main_thread = threading.get_ident()
        self.users = Threads()
        """The threads of the program that use hvdlite."""
        self.users.add()
        self.lacks: dict[int, Callable[[str | int, int], bool]] = {}
        """By the number of each group: returns whether this rank lacks the operation with this key and number."""
        self._exchanges: dict[tuple[int, int], int] = {}  # the number of gradient exchanges begun, by group and channel
        self._channels: dict[int, int] = {}  # the latest channel number, by group
        self._is_searching = False
        """Whether messages of the deadlock detector came or went since the last look."""
        self._deadlocks = DeadlockDetector(transport.rank, self._search, self._lacks)
        self._waits: dict[int, Wait] = {}
        self._numbers = itertools.count()
        self._completed: tuple[Callable[[], str], float] | None = None
        self._stalls = Stalls(transport.rank, config, self._tell, self._give_up, self._informer.stack_of)
        self.losses = LostRanks(transport.rank, transport.size, config.control)
        """The ranks that have failed, and without which the job goes on."""
        self._departures = Departures(transport.size)
        self._launches = LaunchWatch()
        self.launches_on = self._launches.add
        self._links = Links(transport.rank, self._tell, self._has_failed)
        self.link = self._links.new
        self._gave_up = False
        self._stopped = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        if transport.size > 1:
            self._thread = threading.Thread(target=self._run, name="hvdlite-watch", daemon=True)
            self._thread.start()

    def new_channel(self, members: Members) -> int:
        """Return a new number for exchanges of the same gradients. All ranks of the group call this in the same order."""
        number = self._channels[members.id] = self._channels.get(members.id, 0) + 1
        return number

    def _has_failed(self, link: Link, error: HvdliteError) -> None:
        for wait in list(self._waits.values()):
            if wait.link is link:
                wait.failed = wait.failed or (time.monotonic(), error)

    def guarded(
        self,
        what: Callable[[], str],
        members: Members,
        remember: bool = True,
        channel: int = 0,
        link: Link | None = None,
        limit: float | None = None,
    ) -> WaitGuard:
        """Return a context manager that watches the body of a with statement, which is inside of a collective.

        Args:
            what: Returns a description of what the body does.
            members: The ranks that must take part.
            remember: Whether the body is an exchange of its own, of which all ranks make the same in the same order. Then
                `completed` is called at its end.
            channel: The number that `new_channel` gave. Without `remember`, another thread of this rank makes the exchange.
            link: The link in which the body runs. Without a link no exception reaches the body, and a failure ends the job.
            limit: The longest time in seconds, for a body with a link; None for the setting `stall_shutdown_time_seconds`.
        """
        return WaitGuard(self, what, members, remember, channel, link, limit)

    def completed(self, what: Callable[[], str]) -> None:
        """Note that this rank has completed something. Reports name the latest; only then `what` is called for its text."""
        self._completed = (what, time.monotonic())

    def fail(self, error: HvdliteError) -> None:
        """End the job, because a wait within a collective can never end."""
        self._end_job(str(error))

    def exchanges_begun(self, members: Members, channel: int) -> int:
        """Return how many exchanges of a group's channel this rank has begun."""
        return self._exchanges.get((members.id, channel), 0)

    def begin_exchange(self, members: Members, channel: int) -> int:
        """Note that this thread begins an exchange. Return its number in this channel of the group, from 1."""
        self.users.add()
        number = self._exchanges[members.id, channel] = self.exchanges_begun(members, channel) + 1
        return number

    def begin(self, wait: Wait) -> int:
        """Start to watch `wait`. Return its number, for `end`."""
        wait.next_report = wait.since + self._config.stall_check_time_seconds
        number = next(self._numbers)
        self._waits[number] = wait
        return number

    def end(self, number: int) -> None:
        """Stop to watch the wait with this number: it is over."""
        del self._waits[number]

    def longest_wait(self, least: float) -> tuple[str, float]:
        """Return what this rank has waited for the longest, and for how many seconds: "" and 0.0 if for less than `least`."""
        waits = of_program(self._waits, self._main_thread)
        since = min((wait.since for wait in waits), default=float("inf"))
        if (lasts := time.monotonic() - since) < least:
            return "", 0.0
        return next(wait.what() for wait in waits if wait.since == since), lasts

    def leave(self, how: str) -> None:
        """Tell the other ranks that this rank leaves the job, and answer their questions until all of them leave.

        `how` says why this rank leaves, for the others' error texts, such as "it has come to the end of its program".
        """
        if self._thread is None:
            return
        launched = self._launches.counts()
        farewell = f"{how} {last_words(self._last())}"
        for rank in range(self._transport.size):
            self._tell(rank, "left", launched, farewell)
        self._wake.set()
        # This rank waits for the others in a watched wait: one that hangs is reported here too, and only at the limit given up.
        everybody = Members(0, tuple(range(self._transport.size)))
        number = self.begin(Wait(lambda: "the end of all ranks", everybody, self.fail, kind=WaitKind.END))
        limit = _GAVE_UP_SECONDS if self._gave_up else float("inf")
        missing = self._departures.wait(self._thread.is_alive, limit)
        if not self._thread.is_alive():
            return
        if missing:
            self._end_job(
                f"this rank has given up a wait before, and {ranks_text(missing)} did not come to an end since."
            )
        self.abandon()
        self._thread.join()
        self.end(number)

    def become_child(self, error: HvdliteError) -> None:
        """Note that this process was forked from the rank: whoever begins an exchange in this process gets `error`."""
        self._waits.clear()
        self._links.fail_all(error)

    def abandon(self) -> None:
        """Stop at once and tell nobody: the job is over already."""
        self._stopped = True
        self._wake.set()

    def _run(self) -> None:
        try:
            self._look_after()
        except PeerLeftError:
            return  # the transport is being torn down, and itself tells whoever waits on it
        except BaseException:  # without this thread nobody would be told who is missing, nor that all have left
            self._end_job(f"the thread that watches over the waits of this rank has failed:\n{traceback.format_exc()}")

    def _look_after(self) -> None:
        period = _PERIOD
        before = time.monotonic()
        while not self._stopped:
            if self._wake.wait(period):  # this rank leaves, and the others soon too: look more often for a while
                self._wake.clear()
                period = _PERIOD / 256
            period = min(2 * period, _PERIOD)
            self._is_searching = False
            self._read_messages()
            self.losses.look(self._departures.note)
            now = time.monotonic()
            self._look(now, now - before)
            before = now
            if self._is_searching:  # more messages will come soon
                period = _PERIOD / 16

    def _look(self, now: float, passed: float) -> None:
        # This is a method of its own: in the loop of the thread, a variable would keep the last wait and its buffers alive.
        self._launches.check()
        for wait in list(self._waits.values()):
            if passed > _SUSPENDED_SECONDS:
                wait.forgive(passed)
            self._check(wait, now)
        if (text := self._deadlocks.look(self._needs(now))) is not None:
            for wait in list(self._waits.values()):
                wait.fail(MismatchError(text))
        self._stalls.look(now, self._departures.left)

    def _read_messages(self) -> None:
        while (received := self._transport.poll()) is not None:
            sender, message = received
            kind, *content = pickle.loads(message)
            if kind == "left":
                launched, farewell = content
                self._launches.hear(sender, launched)
                self._departures.note(sender, farewell)
            elif kind == "failed":
                self._links.hear_failure(sender, *content)
            elif kind == "where":
                self._tell(sender, "here", content[0], self._where(content[1]))
            elif kind == "here":
                self._stalls.hear(sender, *content)
            elif kind in DeadlockDetector.KINDS:
                self._is_searching = True
                self._deadlocks.receive(sender, kind, content[0])

    def _tell(self, dest: int, *content: object) -> None:
        if dest not in self.losses.lost:
            self._transport.post(pickle.dumps(content), dest)

    def _search(self, dest: int, kind: str, content: object) -> None:
        self._is_searching = True
        self._tell(dest, kind, content)

    def _needs(self, now: float) -> Needs:
        """Return what this rank needs to go on, if it is stuck; empty if it is not, or if that is not certain."""
        waits = list(self._waits.values())
        if not waits or any(now < wait.since + self._config.deadlock_time_seconds for wait in waits):
            return ()
        if not self.users.are_all_among({wait.thread for wait in waits}):
            return ()  # another thread of the program may still do what the other ranks wait for
        needs = [None if wait.need is None else wait.need() for wait in waits]
        return () if None in needs else tuple(dict.fromkeys(need for need in needs if need is not None))

    def _lacks(self, need: Need) -> bool:
        """Return whether this rank has not done its part of what another rank needs."""
        if need.letter is not None:
            return self._links.did_its_part(need.letter) is False
        if need.operation is None:
            begun = self.exchanges_begun(need.members, need.channel)
            return self._transport.rank in need.members.ranks and begun < need.number
        lacks = self.lacks.get(need.members.id)
        return lacks is not None and lacks(need.operation, need.number)

    def _where(self, letter: Letter | None) -> StallAnswer:
        now = time.monotonic()
        waits = tuple((wait.what(), now - wait.since) for wait in of_program(self._waits, self._main_thread))
        return StallAnswer(waits, stack_of_program(self._main_thread), self._last(), self._links.did_its_part(letter))

    def _last(self) -> tuple[str, float] | None:
        completed = self._completed
        return None if completed is None else (completed[0](), time.monotonic() - completed[1])

    def _check(self, wait: Wait, now: float) -> None:
        if wait.failed is not None:
            since, error = wait.failed
            if now > since + (_LEFT_SECONDS if is_in_messages(wait.thread) else _BUSY_SECONDS):
                self._end_job(str(error))
            return
        needed = () if wait.kind is WaitKind.END else wait.one_of or wait.members.ranks
        gone = [rank for rank in needed if now > max(self._departures.left.get(rank, now), wait.since) + _LEFT_SECONDS]
        if gone and (not wait.one_of or len(gone) == len(needed)):
            error = PeerLeftError(left_text(gone[0], wait.what(), self._departures.farewells[gone[0]]))
            wait.failed = now, error
            wait.fail(error)
        elif wait.kind is not WaitKind.SERVICE:
            self._stalls.check(wait, now)

    def _give_up(self, wait: Wait, text: str, hung: Sequence[int]) -> None:
        # What a program may catch is raised, if the job ends otherwise. In an elastic job the rank that hangs has failed, and
        # not this one: it is ended, and the others go on without it.
        is_fatal = wait.link is None or bool(self._config.generation)
        if wait.limit is None and is_fatal and self._informer.has_failed(hung, text):
            return
        if wait.link is None:
            self._end_job(text)
        else:
            self._gave_up = True
            wait.link.give_up(CommunicationError(text))
