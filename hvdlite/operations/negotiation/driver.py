"""Drives the operations of a group: announces new operations, reads the decisions of the controller, and runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from hvdlite.comm.ballot import What
from hvdlite.comm.gpu.groups import GroupCollectives
from hvdlite.comm.naps import wait_until
from hvdlite.errors import HvdliteError, PeerLeftError
from hvdlite.operations import SHARED_BUCKETS, Operation, Signature, operation_for_absent
from hvdlite.operations.negotiation.controller import Controller, error_of
from hvdlite.operations.negotiation.express import Express, Undecided
from hvdlite.operations.negotiation.handle import Handle
from hvdlite.operations.negotiation.in_flight import InFlight, in_words
from hvdlite.operations.negotiation.messages import JOIN, Decision, Key
from hvdlite.protocols import Transport
from hvdlite.ranks.topology import Members
from hvdlite.timeline import Row, RunRecord, Timeline
from hvdlite.watchdog.deadlock import Need
from hvdlite.watchdog.links import Link
from hvdlite.watchdog.watchdog import Watchdog


class Driver:
    """Moves the operations of one group forward. Any thread may drive, one at a time.

    Args:
        transport: The transport for the control messages.
        in_flight: The operations of this rank.
        submit_lock: The lock of the engine that protects `in_flight` while the program submits.
        execution: The object that runs the operations.
        members: The ranks of the group.
        link: The link of the group: it breaks if a rank gets out of step.
        fusion_threshold: The largest number of bytes of fused operations.
        new_handle: A function that makes a handle for an operation that this rank, which has joined, did not submit.
        timeline: The timeline, which records plans.

    Attributes:
        broken: The error that has broken the group; None if there is none.
        thread: The number of the thread that is driving; 0 if none is.
        make_late: A function that makes the operation for shared gradient buckets on a rank that has joined. The group sets it.
    """

    def __init__(
        self,
        transport: Transport,
        in_flight: InFlight,
        submit_lock: threading.RLock,
        execution: Execution,
        members: Members,
        link: Link,
        fusion_threshold: int,
        new_handle: Callable[[Key], Handle[Any]],
        timeline: Timeline,
    ) -> None:
        self._rank, self._size = transport.rank, transport.size
        self._in_flight = in_flight
        self._submit_lock = submit_lock
        self._execution = execution
        self._members = members
        self._link = link
        self._fusion_threshold = fusion_threshold
        self._new_handle = new_handle
        self._timeline = timeline
        self._controller = Controller(transport, self._fuse)
        # Reentrant, so that a signal handler that has interrupted the owner can go on and raise `interrupted`.
        self._lock = threading.RLock()  # whoever holds it drives
        self.thread = 0
        self._followed = 0  # plans that are carried out
        self.broken: HvdliteError | None = None
        self.make_late: Callable[[Signature], Operation]

    @property
    def plans(self) -> int:
        """The number of plans that this rank has made or received."""
        return self._controller.plans

    def check_not_interrupted(self) -> None:
        """Raise `interrupted` if the calling thread is driving: then a signal handler has interrupted it."""
        if self.thread and self.thread == threading.get_ident():
            raise interrupted()

    def drive_for(self, handle: Handle[Any]) -> bool:
        """Drive one step unless `handle` is done. Return whether there was any progress."""
        with self._lock:
            return handle.done or self._drive()

    def drive_if_free(self) -> bool:
        """Drive one step if no other thread drives. Return whether there was any progress."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._drive()
        finally:
            self._lock.release()

    def drive_to_the_end(self) -> None:
        """Carry out all plans that there are: a rank that is in one needs the others. All ranks call this."""
        if self._rank == 0:
            with self._lock:
                self._controller.end()
        wait_until(self._has_ended, lambda: None)

    def _has_ended(self) -> bool:
        """Drive one step. Return whether there are no more plans."""
        if self.broken is None:
            self.drive_if_free()
        else:  # its plans are not carried out, but the ranks below wait for their end, too
            with self._lock:
                try:
                    self._controller.step()
                except PeerLeftError:
                    return True
        return self._controller.ended

    def run_at_once(
        self, express: Express, operation: Operation, name: str | None
    ) -> tuple[Key, Any, Handle[Any] | None]:
        """Run an operation if all ranks call it now.

        Returns:
            The key of the operation; and its result if it `is_small`, otherwise None and a handle that is over.

        Raises:
            Undecided: Nothing has happened, on any rank.
            DuplicateNameError: An operation of this name is in flight.
            BaseException: An error has interrupted this rank, such as one of a signal handler. Then the operation is in flight;
                or this rank was bound to it already, and the group is `broken`.
        """
        if not self._lock.acquire(blocking=False):
            raise Undecided
        try:
            self.thread = threading.get_ident()
            with self._submit_lock:  # so that no other thread submits an operation with the same number
                if self.broken is not None or self._in_flight.entries:
                    raise Undecided
                key = self._in_flight.next_key(name)
                what = self._controller.identify(key, operation.signature)
                if what is None:
                    raise Undecided
                result, handle = self._agree_at_once(express, what, key, operation)
            if handle is not None:
                self._run_agreed(key)
        finally:
            self.thread = 0
            self._lock.release()
        return key, result, handle

    def _agree_at_once(
        self, express: Express, what: What, key: Key, operation: Operation
    ) -> tuple[Any, Handle[Any] | None]:
        try:
            express.begin(what)
            result = express.run(operation)
            self._in_flight.use_up(key)
            if operation.is_small:
                return result, None
            handle = self._new_handle(key)
            self._in_flight.put_agreed(key, operation, handle)
            return None, handle
        except Undecided:
            raise
        except BaseException as error:
            if express.has_agreed() is False:
                self._in_flight.use_up(key)
                self._in_flight.put(key, operation, self._new_handle(key))  # the other ranks wait for it
            else:
                self._link.break_off(f"its part of {in_words(key, operation.signature)}", error)
            raise

    def _run_agreed(self, key: Key) -> None:
        try:
            self._execution.run(Decision((key,), None))
        except BaseException as error:
            self._link.break_off(f"its part of {self._in_flight.describe(key)}", error)
            raise

    def report_blocked(self, is_blocked: Callable[[], bool]) -> None:
        """Tell the other ranks that this rank is blocked, if `is_blocked` says so."""
        with self._lock:
            if not self._in_flight.new and is_blocked():
                self._controller.report_blocked(self._in_flight.signatures())

    def become_child(self, error: HvdliteError) -> None:
        """Let every operation raise `error`: this process was forked from the rank and takes no part in the job."""
        self._lock, self.thread = threading.RLock(), 0  # a thread that does not exist in the child may have held it
        self.broken = error

    # For the watchdog, from its thread

    def need(self, key: Key) -> Need | None:
        """Return what the wait for `key` needs from the other ranks. Return None while a plan runs, which may end the wait."""
        followed = self._followed
        if key not in self._in_flight.entries or followed != self._controller.plans:
            return None
        return Need(self._members, key, followed, self._in_flight.describe(key))

    def lacks(self, key: Key, plans: int) -> bool:
        """Say whether this rank has not submitted `key`, for which a rank waits that has followed `plans` plans."""
        in_flight = self._in_flight
        return key not in in_flight.entries and not in_flight.has_joined and self._controller.plans == plans

    # Under the lock

    def _drive(self) -> bool:
        if self.thread:
            self.check_not_interrupted()
        # A wait is mostly this look, which changes nothing: an exception of a signal handler leaves nothing in the middle.
        if not (self._in_flight.new or self.broken is not None or self._controller.has_work()):
            return False
        try:
            self.thread = threading.get_ident()
            return self._step()
        except BaseException as error:  # raised by a signal handler, most likely
            self._link.break_off("the agreement on operations", error)
            raise
        finally:
            self.thread = 0

    def _step(self) -> bool:
        in_flight = self._in_flight
        if self.broken is not None:
            in_flight.fail(list(in_flight.entries), self.broken)
            return True
        moved = False
        while in_flight.new:
            key = in_flight.new.popleft()
            entry = in_flight.entries.get(key)
            if key == JOIN:
                self._controller.join()
            elif entry is not None:  # None: this rank's operation has failed already, by a mismatch under its name
                self._controller.announce(key, entry[0].signature)
            moved = True
        try:
            decisions = self._controller.step()
        except PeerLeftError as error:  # nothing can be received any more: all waits must end
            self.broken = error
            return True
        self._take_part_for_absent()
        if decisions and self._timeline.on:
            self._execution.note_plan()
        for decision in decisions:
            self._carry_out(decision)
        self._followed = self._controller.plans
        return moved or bool(decisions)

    def _take_part_for_absent(self) -> None:
        """Make an operation for each one that the others have submitted while this rank has joined."""
        if not self._controller.unsubmitted:
            return
        with self._submit_lock:
            for key, signature in self._controller.unsubmitted.items():
                late = signature[0] == SHARED_BUCKETS
                operation = (
                    self.make_late(signature) if late else operation_for_absent(signature, self._rank, self._size)
                )
                self._in_flight.put_for_absent(key, operation, self._new_handle(key))
            self._controller.unsubmitted.clear()

    def _carry_out(self, decision: Decision) -> None:
        if decision.last_joined is not None:
            self._in_flight.finish_join(decision.last_joined)
        elif decision.error is not None:
            self._in_flight.fail(decision.keys, error_of(decision))
            with self._submit_lock:
                self._in_flight.skip(decision.keys)
        else:
            self._execution.run(decision)

    def _fuse(self, keys: Sequence[Key]) -> Iterator[list[Key]]:
        if len(keys) > 1:
            self._take_part_for_absent()
        return self._in_flight.fuse(keys, self._fusion_threshold)


def interrupted() -> HvdliteError:
    """Return the error of an operation that a thread calls in the middle of another operation, in a signal handler."""
    return HvdliteError(
        "an operation was called in the middle of another one of the same thread, so it cannot be done: in a signal "
        "handler that has interrupted it, or in a destructor. Set a flag there, and call the operation when the "
        "program's loop sees the flag."
    )


class Execution:
    """Runs the operations of one group, in the order that all its ranks have.

    Args:
        in_flight: The operations of this rank that are not over.
        collectives: The collectives that run the operations. Nobody else may use them.
        members: The ranks of the group.
        watch: The watchdog, which owns the wait while an operation runs.
        link: The link of the group: it breaks if a rank gets out of step.
        timeline: The timeline, which records every operation.
    """

    def __init__(
        self,
        in_flight: InFlight,
        collectives: GroupCollectives,
        members: Members,
        watch: Watchdog,
        link: Link,
        timeline: Timeline,
    ) -> None:
        self._in_flight = in_flight
        self._collectives = collectives
        self._members = members
        self._watch = watch
        self._timeline = timeline
        self._runs = 0  # the number of runs so far, equal on all ranks; it counts without a timeline too
        self._decided = 0  # the time at which the latest plan was known, for the timeline
        self._running: Key = 0
        self._watching = watch.guarded(
            lambda: f"its part of {in_flight.describe(self._running)}", members, remember=False, link=link
        )

    def note_plan(self) -> None:
        """Note the time of a plan, for the timeline."""
        self._decided = self._timeline.clock()
        if self._timeline.mark_cycles:
            self._timeline.mark(Row.NEGOTIATION, "CYCLE", "CYCLE_START")

    def run(self, decision: Decision) -> None:
        """Run the operations of a decision as one. Their handles get an error; only an interruption is raised here."""
        in_flight = self._in_flight
        entries = [in_flight.entries[key] for key in decision.keys]
        operations = [operation for operation, _ in entries]
        self._runs += 1
        collectives, run, counts = self._collectives, None, self._timeline.counts
        if self._timeline.on:
            records = [handle.record for _, handle in entries]
            run = RunRecord(self._timeline, records, self._decided, self._runs, self._members.ranks)
            if operations[0].device_kind is None:  # on a GPU the host only launches work, and does not see the transfer
                collectives = run.timed(collectives)
        try:
            self._running = decision.keys[0]
            if counts is not None:
                counts.ready()
            with self._watching:
                results = type(operations[0]).run_together(operations, collectives)
        except BaseException as error:  # the watchdog has told the other ranks if they must know
            in_flight.fail(decision.keys, error)
            if isinstance(error, Exception):
                return
            raise
        if run is not None:
            run.done()
        if counts is not None:
            counts.done()
        for key, (operation, handle), result in zip(decision.keys, entries, results, strict=True):
            del in_flight.entries[key]
            handle.finish(operation.outcome(result), None, operation.hand_over)
        self._watch.completed(partial(in_words, decision.keys[-1], operations[-1].signature))
