"""Named operations in any order: submit on every rank, run when all have.

The caller who waits for an operation drives the engine itself, so a small blocking operation costs no thread switch and
no cycle. Operations that nobody waits for are driven by a thread that starts with the first of them, sleeps while there
is nothing in flight, and never spins.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from hvdlite.config import Config
from hvdlite.errors import ArgumentError, DuplicateNameError, HvdliteError, PeerLeftError
from hvdlite.gpu.groups import GroupCollectives
from hvdlite.negotiation.controller import Controller, Decision, error_of
from hvdlite.negotiation.handle import Handle
from hvdlite.negotiation.messages import JOIN, Key
from hvdlite.negotiation.mismatch import name_of
from hvdlite.operations import SHARED_BUCKETS, Join, Operation, Signature, describe, stand_in
from hvdlite.protocols import Transport
from hvdlite.timeline import Row, RunRecord, Timeline
from hvdlite.watchdog.deadlock import Need
from hvdlite.watchdog.threads import Threads
from hvdlite.watchdog.watchdog import Wait, Watchdog

T = TypeVar("T")

_SPINS = 200
"""Looks without a pause in between before a waiting caller begins to give its core away."""
_WATCH_AFTER = 0.05
"""Seconds in one wait before the watch is told; shorter waits cost nothing."""
_LONGEST_NAP = 1e-3
_FIRST_NAP = 50e-6
_GRACE = 200e-6
"""Seconds that the thread leaves to the submitter, who may submit more to be fused, or wait and drive by itself."""


class Engine:
    """The named operations of one group of ranks.

    Args:
        transport: Carries the controller's letters.
        collectives: Run the operations; nobody else may use them.
        ranks: The world ranks of the group, for messages.
        watch: Is told of waits that last.
        config: Fusion threshold and time limits.
        timeline: Is told of every operation.
    """

    def __init__(
        self,
        transport: Transport,
        collectives: GroupCollectives,
        ranks: Sequence[int],
        watch: Watchdog,
        config: Config,
        timeline: Timeline,
    ) -> None:
        self._transport = transport
        self._collectives = collectives
        self._ranks = ranks
        self._watch = watch
        self._config = config
        self._timeline = timeline
        self.kinds: set[str] = set()
        """Of the operations that this rank has submitted."""
        self._runs = 0  # that all ranks have made, whether a timeline was kept or not
        self._decided = 0  # when the latest plan was known, for the timeline
        self._controller = Controller(transport, self._fuse)
        # Reentrant, so that a signal handler that has interrupted their owner comes far enough to be told.
        self._drive_lock = threading.RLock()  # whoever holds it drives
        self._submit_lock = threading.RLock()
        self._driver = 0  # the thread that is in the middle of driving
        self._submitting = False
        self._inbox: deque[Key] = deque()
        self._in_flight: dict[Key, tuple[Operation, Handle[Any]]] = {}
        self._names: dict[Key, int] = {}  # in use, and by which handle
        self._sequence = 0
        self._submitters = Threads()
        self._waiting: dict[int, float] = {}  # thread -> since when
        self._broken: HvdliteError | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._followed = 0  # plans that are carried out
        self._running: Key = 0
        self._link = watch.link(ranks, 0, self._interrupt)
        self._watching = watch.exchanging(
            lambda: f"its part of {self._describe(self._running)}", ranks, remember=False, link=self._link
        )
        # Set by the world: makes shared buckets where this rank has joined.
        self.make_late: Callable[[Signature], Operation]
        watch.lacks[tuple(ranks)] = self._lacks

    def submit(self, operation: Operation, name: str | None = None, background: bool = True) -> Handle[Any]:
        """Put an operation in flight.

        Args:
            operation: What to do.
            name: Operations of equal name belong together on all ranks, in whatever order they are submitted. Those without
                a name belong together by their order.
            background: Let the thread drive it; False if the caller waits at once.

        Raises:
            DuplicateNameError: An operation of this name has not been waited for yet.
            ArgumentError: `name` is no text.
            HvdliteError: This rank has joined; or this is a signal handler that has interrupted an operation.
            DeviceError: Its tensors lie on another GPU than those of earlier operations.
        """
        if name is not None and not isinstance(name, str):
            raise ArgumentError(f"name={name!r}: expected a text (str), or None; got {type(name).__name__}.")
        if operation.device is not None:
            self._collectives.choose(operation.device)
        with self._submit_lock:
            if self._submitting or self._driver:
                self._check_not_interrupted(self._submitting)
            self._check_open(operation.signature)
            try:
                self._submitting = True
                if name is None:
                    key: Key = self._sequence
                    self._sequence += 1
                elif name in self._names:
                    raise DuplicateNameError(
                        f"an operation named {name!r} is still in flight on this rank: wait for its handle before the "
                        "name is used again, or leave the name out."
                    )
                else:
                    key = name
                handle = self._put(key, operation)
                if name is not None:
                    self._names[name] = id(handle)
            finally:
                self._submitting = False
        if background:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hvdlite-engine", daemon=True)
                self._thread.start()
            self._wake.set()
        return handle

    def run(self, operation: Operation, name: str | None = None) -> Any:
        """Submit an operation and wait for its result."""
        return self.submit(operation, name, background=False).wait()

    def join(self) -> int:
        """Submit nothing more until all ranks have called this; take part in what they submit meanwhile, adding nothing.

        Returns:
            The rank that was the last to join, the same on all.

        Raises:
            HvdliteError: This rank has joined already (in another thread).
            PeerLeftError: A rank has left the job without joining.
        """
        with self._submit_lock:
            self._check_not_interrupted(self._submitting)
            operation = Join()
            self._check_open(operation.signature)
            handle = self._put(JOIN, operation)
        last: int = handle.wait()
        return last

    @property
    def has_joined(self) -> bool:
        """Whether this rank has joined and others have not."""
        return JOIN in self._in_flight

    def _check_not_interrupted(self, within: bool) -> None:
        """Nothing can be done in the middle of what this very thread does here. `within`: it does something else than drive."""
        if within or (self._driver and self._driver == threading.get_ident()):
            raise HvdliteError(
                "an operation was called in the middle of another one of the same thread, so it cannot be done: in a signal "
                "handler that has interrupted it, or in a destructor. Set a flag there, and call the operation when the "
                "program's loop sees the flag."
            )

    def _check_open(self, signature: Signature) -> None:
        if self._broken is not None:
            raise self._broken
        if self.has_joined:
            raise HvdliteError(
                f"this rank has called join(), so until all ranks have, it cannot call {describe(signature)}: another "
                "thread of it has to wait for join() to return."
            )

    def _put(self, key: Key, operation: Operation) -> Handle[Any]:
        handle: Handle[Any] = Handle(self, key)
        kind = operation.signature[0]
        self.kinds.add(kind)
        if self._timeline.on:
            handle.record = self._timeline.submitted(kind, key, operation.nbytes)
        self._in_flight[key] = (operation, handle)
        self._inbox.append(key)
        self._submitters.add()
        self._watch.users.add()
        return handle

    def poll(self, handle: Handle[Any]) -> bool:
        """Whether `handle` is done; drives the engine a step if nobody does."""
        done = handle.done
        if done:
            self.release_name(handle)
        elif self._drive_lock.acquire(blocking=False):
            try:
                self._drive()
            finally:
                self._drive_lock.release()
        return done

    def release_name(self, handle: Handle[Any]) -> None:
        """The name of `handle` may be used again: its result has been seen, or nobody can ask for it."""
        if self._names.get(handle.key) == id(handle):
            self._names.pop(handle.key, None)

    def wait(self, handle: Handle[Any]) -> None:
        """Drive the engine until `handle` is done."""
        if not handle.done:
            thread = threading.get_ident()
            interrupted = self._waiting.get(thread)  # by a signal handler, in which this is
            begin = self._timeline.clock() if self._timeline.on else 0
            watched = None
            try:
                self._waiting[thread] = started = time.monotonic()
                spins = 0
                while True:
                    with self._drive_lock:
                        if handle.done:
                            break
                        moved = self._drive()
                    if handle.done:
                        break
                    if moved:
                        spins = 0
                        self._waiting[thread] = time.monotonic()
                        if handle.key == JOIN:  # the others are at work: this wait has only begun
                            started = self._waiting[thread]
                            if watched is not None:
                                self._watch.end(watched)
                                watched = None
                    spins += 1
                    if spins > _SPINS:
                        self._report_if_blocked()
                        waited = time.monotonic() - started
                        time.sleep(min(_LONGEST_NAP, max(_FIRST_NAP, waited / 20)))
                        if watched is None and waited > _WATCH_AFTER:
                            what, need = partial(self._describe, handle.key), partial(self._need, handle.key)
                            wait = Wait(what, self._ranks, self._link.fail, started, need=need, link=self._link)
                            watched = self._watch.begin(wait)
                    elif spins > 10:
                        os.sched_yield()
            finally:
                if interrupted is None:
                    self._waiting.pop(thread, None)
                else:
                    self._waiting[thread] = interrupted
                if watched is not None:
                    self._watch.end(watched)
                if begin and handle.record is not None:
                    self._timeline.add(Row.PROGRAM, "WAIT", handle.record.name, begin)
        self.release_name(handle)

    def abandon(self, error: HvdliteError) -> None:
        """Fail everything in flight, and whatever comes: the group is no longer whole."""
        self._broken = self._broken or error

    def _interrupt(self, error: HvdliteError) -> None:
        self.abandon(error)
        self._collectives.stop(error)

    def become_child(self, error: HvdliteError) -> None:
        """This process was forked from the rank: whoever calls an operation in it gets `error`."""
        # Threads that are not here may have held them.
        self._drive_lock, self._submit_lock = threading.RLock(), threading.RLock()
        self._driver, self._submitting, self._closed = 0, False, True
        self._broken = error

    @property
    def rank(self) -> int:
        """This process's number within the group."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return self._transport.size

    @property
    def busy(self) -> bool:
        """Whether operations of this rank are in flight."""
        return bool(self._in_flight)

    def stop(self) -> None:
        """End the thread."""
        self._closed = True
        self._wake.set()

    def close(self) -> None:
        """End the thread and release the transport. Nothing may be in flight."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
        del self._watch.lacks[tuple(self._ranks)]
        self._collectives.close()
        self._transport.close()

    def _describe(self, key: Key) -> str:
        entry = self._in_flight.get(key)
        return _in_words(key, entry[0].signature) if entry and key != JOIN else name_of(key)

    # For the watch, from its thread

    def _need(self, key: Key) -> Need | None:
        """What the wait for `key` needs of the other ranks; None while a plan is carried out, which may end it."""
        followed = self._followed
        if key not in self._in_flight or followed != self._controller.plans:
            return None
        return Need(tuple(self._ranks), key, followed, self._describe(key))

    def _lacks(self, key: Key, plans: int) -> bool:
        """Whether this rank has not submitted what another waits for that has followed as many plans."""
        return key not in self._in_flight and not self.has_joined and self._controller.plans == plans

    # Driving, under the drive lock

    def _drive(self) -> bool:
        """One step: announce what was submitted, hear what was decided, do it. Returns whether anything moved."""
        if self._driver:
            self._check_not_interrupted(False)
        try:
            self._driver = threading.get_ident()
            return self._step()
        except BaseException as error:  # raised by a signal handler, most likely
            self._link.break_off("the agreement on operations", error)
            raise
        finally:
            self._driver = 0

    def _step(self) -> bool:
        if self._broken is not None:
            self._fail(list(self._in_flight), self._broken)
            return True
        moved = False
        while self._inbox:
            key = self._inbox.popleft()
            entry = self._in_flight.get(key)
            if key == JOIN:
                self._controller.join()
            elif entry is not None:  # None: failed already, together with what other ranks had submitted under its name
                self._controller.announce(key, entry[0].signature)
            moved = True
        try:
            decisions = self._controller.step()
        except PeerLeftError as error:  # the transport is gone: whoever waits must hear of it
            self.abandon(error)
            return True
        self._stand_in()
        if decisions and self._timeline.on:
            self._note_plan()
        for decision in decisions:
            self._carry_out(decision)
        self._followed = self._controller.plans
        return moved or bool(decisions)

    def _note_plan(self) -> None:
        self._decided = self._timeline.clock()
        if self._timeline.mark_cycles:
            self._timeline.mark(Row.NEGOTIATION, "CYCLE", "CYCLE_START")

    def _report_if_blocked(self) -> None:
        with self._drive_lock:
            if not self._inbox and self._is_blocked():
                self._controller.report_blocked([(key, op.signature) for key, (op, _) in list(self._in_flight.items())])

    def _is_blocked(self) -> bool:
        """Whether every thread that ever submitted has waited for some time, so that nothing more will be submitted."""
        before = time.monotonic() - self._config.deadlock_time_seconds
        waiting = dict(self._waiting)
        if any(since > before for since in waiting.values()):
            return False
        return self._submitters.are_all_among(waiting)

    def _stand_in(self) -> None:
        """This rank has joined: give it a part in what the others have submitted and it has not."""
        if not self._controller.unsubmitted:
            return
        with self._submit_lock:
            for key, signature in self._controller.unsubmitted.items():
                late = signature[0] == SHARED_BUCKETS
                operation = self.make_late(signature) if late else stand_in(signature, self.rank, self.size)
                self._in_flight[key] = (operation, Handle(self, key))
                if isinstance(key, int):  # so that the unnamed operations after join meet again
                    self._sequence = max(self._sequence, key + 1)
            self._controller.unsubmitted.clear()

    def _carry_out(self, decision: Decision) -> None:
        if decision.last_joined is not None:
            _, handle = self._in_flight.pop(JOIN)
            if handle.record is not None:
                self._timeline.settled(handle.record)
            handle.finish(decision.last_joined, None)
            return
        if decision.error is not None:
            self._fail(decision.keys, error_of(decision))
            with self._submit_lock:  # so that the unnamed operations after this one meet again
                numbers = [key for key in decision.keys if isinstance(key, int)]
                self._sequence = max([self._sequence, *(number + 1 for number in numbers)])
            return
        entries = [self._in_flight[key] for key in decision.keys]
        operations = [operation for operation, _ in entries]
        self._runs += 1
        collectives, run = self._collectives, None
        if self._timeline.on:
            records = [handle.record for _, handle in entries]
            run = RunRecord(self._timeline, records, self._decided, self._runs, self._ranks)
            if operations[0].device_kind is None:  # else the host takes no part in the exchange, and all is launching
                collectives = run.timed(collectives)
        try:
            self._running = decision.keys[0]
            with self._watching:
                results = type(operations[0]).run_together(operations, collectives)
        except BaseException as error:  # the watch has told the others, if they have to know
            self._fail(decision.keys, error)
            if isinstance(error, Exception):
                return
            raise
        if run is not None:
            run.done()
        for key, (operation, handle), result in zip(decision.keys, entries, results, strict=True):
            del self._in_flight[key]
            handle.finish(operation.outcome(result), None, operation.hand_over)
        self._watch.completed(partial(_in_words, decision.keys[-1], operations[-1].signature))

    def _fail(self, keys: Sequence[Key], error: BaseException) -> None:
        for key in keys:
            entry = self._in_flight.pop(key, None)
            if entry is not None:
                record = entry[1].record
                if record is not None:
                    self._timeline.settled(record, error)
                entry[1].finish(None, error)

    def _fuse(self, keys: Sequence[Key]) -> Iterator[list[Key]]:
        """Group keys whose operations share an exchange, up to the fusion threshold."""
        if len(keys) == 1:
            yield list(keys)
            return
        self._stand_in()
        groups: dict[Any, tuple[list[Key], int]] = {}
        for key in keys:
            operation = self._in_flight[key][0]
            kind = operation.fusion_key
            group, nbytes = groups.get(kind, ([], 0))
            if group and (kind is None or nbytes + operation.nbytes > self._config.fusion_threshold):
                yield group
                group, nbytes = [], 0
            groups[kind] = ([*group, key], nbytes + operation.nbytes)
        for group, _ in groups.values():
            yield group

    # Driving what nobody waits for

    def _run(self) -> None:
        nap = _FIRST_NAP
        while not self._closed:
            if not self._in_flight:
                self._wake.wait()
                self._wake.clear()
                time.sleep(_GRACE)
                continue
            moved = False
            if not self._waiting and self._drive_lock.acquire(blocking=False):
                try:
                    moved = self._drive()
                finally:
                    self._drive_lock.release()
            nap = _FIRST_NAP if moved else min(2 * nap, _LONGEST_NAP)
            time.sleep(nap)


def _in_words(key: Key, signature: Signature) -> str:
    return f"{name_of(key)}: {describe(signature)}"
