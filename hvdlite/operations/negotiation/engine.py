"""Named operations in any order: every rank submits an operation, and it runs when all ranks have submitted it.

A thread that waits for an operation drives the engine itself. So a small blocking operation costs no thread switch, and there
is no cycle time. While nobody waits, a background thread drives the engine. It starts with the first operation that needs it,
sleeps while no operation is in flight, and never spins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

from hvdlite.comm.background import Background
from hvdlite.comm.gpu.groups import GroupCollectives
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.operations import Join, Operation, Signature, describe, needs_every_rank
from hvdlite.operations.negotiation.driver import Driver, Execution, interrupted
from hvdlite.operations.negotiation.express import Express, Undecided, make_express
from hvdlite.operations.negotiation.handle import Handle
from hvdlite.operations.negotiation.in_flight import InFlight, in_words
from hvdlite.operations.negotiation.messages import JOIN, Key
from hvdlite.protocols import Transport
from hvdlite.ranks.own_core import yield_core
from hvdlite.ranks.topology import Members
from hvdlite.timeline import Timeline
from hvdlite.watchdog.threads import Threads
from hvdlite.watchdog.waits import Wait
from hvdlite.watchdog.watchdog import Watchdog

_SPINS = 200
"""How often a waiting thread looks without a pause before it begins to offer its core to others."""
_WATCH_AFTER = 0.05
"""The time in seconds after which a wait is registered with the watchdog. Shorter waits cost nothing."""
LONGEST_NAP = 1e-3
FIRST_NAP = 50e-6


class Waiters:
    """The threads that use one engine, and the threads of these that wait.

    Args:
        drive: A function that drives the engine one step unless the operation is over. It returns whether there was progress.
        report_if_blocked: A function that is called again and again during a wait.
        watched: A function that makes the watchdog's `Wait` from a handle and the time at which its wait began.
        watch: The watchdog, which owns waits that last.
    """

    def __init__(
        self,
        drive: Callable[[Handle[Any]], bool],
        report_if_blocked: Callable[[], None],
        watched: Callable[[Handle[Any], float], Wait],
        watch: Watchdog,
    ) -> None:
        self._drive, self._report_if_blocked, self._watched, self._watch = drive, report_if_blocked, watched, watch
        self._submitters = Threads()
        self._since: dict[int, float] = {}  # for each waiting thread the time at which its wait began

    def add_submitter(self) -> None:
        """Note that the calling thread uses the engine."""
        self._submitters.add()
        self._watch.users.add()

    def __bool__(self) -> bool:
        """Say whether any thread waits."""
        return bool(self._since)

    def all_have_waited(self, seconds: float) -> bool:
        """Say whether every thread that ever submitted has waited for `seconds`: then nothing more will be submitted."""
        before = time.monotonic() - seconds
        waiting = dict(self._since)
        if any(since > before for since in waiting.values()):
            return False
        return self._submitters.are_all_among(waiting)

    def wait(self, handle: Handle[Any]) -> None:
        """Return when the operation is over."""
        thread = threading.get_ident()
        interrupted = self._since.get(thread)  # not None: this runs in a signal handler, during another wait
        watched = None
        try:
            self._since[thread] = started = time.monotonic()
            spins = 0
            while True:
                moved = self._drive(handle)
                if handle.done:
                    break
                if moved:
                    spins = 0
                    self._since[thread] = time.monotonic()
                    if handle.key == JOIN:  # the other ranks made progress, so the wait counts from now
                        started = self._since[thread]
                        if watched is not None:
                            self._watch.end(watched)
                            watched = None
                spins += 1
                if spins > _SPINS:
                    self._report_if_blocked()
                    waited = time.monotonic() - started
                    time.sleep(min(LONGEST_NAP, max(FIRST_NAP, waited / 20)))
                    if watched is None and waited > _WATCH_AFTER:
                        watched = self._watch.begin(self._watched(handle, started))
                elif spins > 10:
                    yield_core()
        finally:
            if interrupted is None:
                self._since.pop(thread, None)
            else:
                self._since[thread] = interrupted
            if watched is not None:
                self._watch.end(watched)


T = TypeVar("T")


class Engine:
    """The named operations of one group of ranks.

    Args:
        transport: The transport for the control messages.
        collectives: The collectives that run the operations. Nobody else may use them.
        members: The ranks of the group.
        watch: The watchdog, which owns waits that last.
        config: The settings: fusion threshold and time limits.
        timeline: The timeline, which records every operation.
    """

    def __init__(
        self,
        transport: Transport,
        collectives: GroupCollectives,
        members: Members,
        watch: Watchdog,
        config: Config,
        timeline: Timeline,
    ) -> None:
        self._transport = transport
        self._collectives = collectives
        self._members = members
        self._watch = watch
        self._timeline = timeline
        # Reentrant, so that a signal handler that has interrupted the owner can go on and raise `interrupted`.
        self._submit_lock = threading.RLock()
        self._submitting = False
        self._in_flight = InFlight(timeline)
        self._link = watch.link(members, 0, self._interrupt)
        self._driver = Driver(
            transport,
            self._in_flight,
            self._submit_lock,
            Execution(self._in_flight, collectives, members, watch, self._link, timeline),
            members,
            self._link,
            config.fusion_threshold,
            partial(Handle, self),
            timeline,
        )
        self._deadlock_seconds = config.deadlock_time_seconds
        self._waiters = Waiters(self._driver.drive_for, self._report_if_blocked, self._watched, watch)
        self._background = Background(
            lambda: not self._in_flight.entries, self._drive_unless_waited_for, "hvdlite-engine"
        )
        watch.lacks[members.id] = self._driver.lacks
        patience = watch.guarded(
            lambda: "an operation that all ranks have called", members, remember=False, link=self._link
        )
        self._express = make_express(collectives, patience)

    def submit(self, operation: Operation, name: str | None = None, background: bool = True) -> Handle[Any]:
        """Submit an operation and return its handle.

        Args:
            operation: The operation.
            name: The name of the operation. Operations of equal name belong together on all ranks, in any order of submission.
                Operations without a name belong together by their order.
            background: True lets the background thread drive the operation; False if the caller waits at once.

        Raises:
            DuplicateNameError: The program has not yet waited for an earlier operation of this name.
            ArgumentError: `name` is not a str.
            HvdliteError: This rank has joined, or a signal handler that has interrupted an operation calls this.
            DeviceError: The tensors lie on another GPU than those of earlier operations.
        """
        _check_name(name)
        if operation.device is not None:
            self._collectives.choose(operation.device)
        with self._submit_lock:
            if self._submitting or self._driver.thread:
                self._check_not_interrupted()
            joined = JOIN in self._in_flight.entries and not needs_every_rank(operation.signature)
            if joined or self._driver.broken is not None:
                self._refuse(operation.signature)
            try:
                self._submitting = True
                handle = self._put(self._in_flight.new_key(name), operation)
            finally:
                self._submitting = False
        if background:
            self._background.wake()
        return handle

    def run(self, operation: Operation, name: str | None = None) -> Any:
        """Submit an operation and wait for its result."""
        if operation.at_once and self._express is not None and not (self._in_flight.entries or self._timeline.on):
            counts = self._timeline.counts
            try:
                if counts is None:
                    return self._run_at_once(self._express, operation, name)
                with self._timeline.wait(""):
                    result = self._run_at_once(self._express, operation, name)
                counts.nbytes += (
                    operation.nbytes if operation.is_small else 0
                )  # others are in flight, and counted there
                return result
            except Undecided:
                pass
        return self.submit(operation, name, background=False).wait()

    def _run_at_once(self, express: Express, operation: Operation, name: str | None) -> Any:
        """Run an operation if all ranks call it now, and return its result. Otherwise raise `Undecided`."""
        _check_name(name)
        if self._submitting or self._driver.thread:
            self._check_not_interrupted()
        self._waiters.add_submitter()
        self._in_flight.kinds.add(operation.signature[0])
        key, result, handle = self._driver.run_at_once(express, operation, name)
        if handle is not None:
            return handle.wait()
        self._watch.completed(partial(in_words, key, operation.signature))
        return result

    def begin_join(self) -> Handle[int]:
        """Let this rank join: until all ranks have joined, it takes part in the operations of the others with no values.

        Returns:
            A handle. Its `wait` returns the rank that joined last, the same on all ranks. It raises PeerLeftError if a rank has
            left the job without joining.

        Raises:
            HvdliteError: This rank has joined already (in another thread).
        """
        with self._submit_lock:
            self._check_not_interrupted()
            operation = Join()
            if self._driver.broken is not None or self.has_joined:
                self._refuse(operation.signature)
            return self._put(JOIN, operation)

    @property
    def has_joined(self) -> bool:
        """True while this rank has joined and others have not."""
        return self._in_flight.has_joined

    @property
    def kinds(self) -> set[str]:
        """The kinds of the operations that this rank has submitted."""
        return self._in_flight.kinds

    def use_to_make_late(self, make: Callable[[Signature], Operation]) -> None:
        """Use `make` for the operation that makes shared gradient buckets on a rank that has joined. The group calls this."""
        self._driver.make_late = make

    def _check_not_interrupted(self) -> None:
        """Raise `interrupted` if the calling thread is in the middle of a submission or a step of the driver."""
        if self._submitting:
            raise interrupted()
        self._driver.check_not_interrupted()

    def _refuse(self, signature: Signature) -> NoReturn:
        if self._driver.broken is not None:
            raise self._driver.broken
        raise HvdliteError(
            f"this rank has called join(), so until all ranks have, it cannot call {describe(signature)}: another "
            "thread of it has to wait for join() to return."
        )

    def _put(self, key: Key, operation: Operation) -> Handle[Any]:
        handle: Handle[Any] = Handle(self, key)
        self._in_flight.put(key, operation, handle)
        self._waiters.add_submitter()
        return handle

    def poll(self, handle: Handle[Any]) -> bool:
        """Say whether `handle` is done. Drive the engine one step if no other thread does."""
        done = handle.done
        if done:
            self.release_name(handle)
        else:
            self._driver.drive_if_free()
        return done

    def release_name(self, handle: Handle[Any]) -> None:
        """Allow the name of `handle` again: the program has seen the result, or cannot ask for it any more."""
        self._in_flight.release_name(handle)

    def wait(self, handle: Handle[Any]) -> None:
        """Drive the engine until `handle` is done."""
        if not handle.done:
            with self._timeline.wait("" if handle.record is None else handle.record.name):
                self._waiters.wait(handle)
        self.release_name(handle)

    def abandon(self, error: HvdliteError) -> None:
        """Fail all operations in flight and all later ones with `error`."""
        self._driver.broken = self._driver.broken or error

    def _interrupt(self, error: HvdliteError) -> None:
        self.abandon(error)
        self._collectives.stop(error)

    def become_child(self, error: HvdliteError) -> None:
        """Let every operation raise `error`: this process was forked from the rank and takes no part in the job."""
        self._submit_lock, self._submitting = threading.RLock(), False  # a thread that is not here may have held it
        self._driver.become_child(error)

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return self._transport.size

    @property
    def busy(self) -> bool:
        """True while operations of this rank are in flight."""
        return bool(self._in_flight.entries)

    def stop(self) -> None:
        """End the background thread."""
        self._background.stop()

    def close(self) -> None:
        """Carry out what all ranks have agreed on, end the background thread, and release the transport.

        All ranks of the group call this. What was not agreed on is not carried out.
        """
        self._driver.drive_to_the_end()
        self.stop()
        self._background.join()
        del self._watch.lacks[self._members.id]
        self._collectives.close()
        self._transport.close()

    # For the threads that wait

    def _watched(self, handle: Handle[Any], started: float) -> Wait:
        what, need = partial(self._in_flight.describe, handle.key), partial(self._driver.need, handle.key)
        return Wait(what, self._members, self._link.fail, started, need=need, link=self._link)

    def _report_if_blocked(self) -> None:
        self._driver.report_blocked(partial(self._waiters.all_have_waited, self._deadlock_seconds))

    def _drive_unless_waited_for(self) -> bool:
        return not self._waiters and self._driver.drive_if_free()


def _check_name(name: object) -> None:
    if name is not None and not isinstance(name, str):
        raise ArgumentError(f"name={name!r}: expected a text (str), or None; got {type(name).__name__}.")
