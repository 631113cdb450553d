"""Carries out decisions: runs the operations, and gives their results to the handles."""

from __future__ import annotations

from functools import partial

from hvdlite.comm.gpu.groups import GroupCollectives
from hvdlite.operations.negotiation.in_flight import InFlight, in_words
from hvdlite.operations.negotiation.messages import Decision, Key
from hvdlite.ranks.topology import Members
from hvdlite.timeline import Row, RunRecord, Timeline
from hvdlite.watchdog.links import Link
from hvdlite.watchdog.watchdog import Watchdog


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
        collectives, run = self._collectives, None
        if self._timeline.on:
            records = [handle.record for _, handle in entries]
            run = RunRecord(self._timeline, records, self._decided, self._runs, self._members.ranks)
            if operations[0].device_kind is None:  # on a GPU the host only launches work, and does not see the transfer
                collectives = run.timed(collectives)
        try:
            self._running = decision.keys[0]
            with self._watching:
                results = type(operations[0]).run_together(operations, collectives)
        except BaseException as error:  # the watchdog has told the other ranks if they must know
            in_flight.fail(decision.keys, error)
            if isinstance(error, Exception):
                return
            raise
        if run is not None:
            run.done()
        for key, (operation, handle), result in zip(decision.keys, entries, results, strict=True):
            del in_flight.entries[key]
            handle.finish(operation.outcome(result), None, operation.hand_over)
        self._watch.completed(partial(in_words, decision.keys[-1], operations[-1].signature))
