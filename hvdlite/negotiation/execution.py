"""Decisions are carried out here: the operations run, and their handles get the results."""

from __future__ import annotations

from functools import partial

from hvdlite.gpu.groups import GroupCollectives
from hvdlite.negotiation.in_flight import InFlight, in_words
from hvdlite.negotiation.messages import Decision, Key
from hvdlite.timeline import Row, RunRecord, Timeline
from hvdlite.topology import Members
from hvdlite.watchdog.links import Link
from hvdlite.watchdog.watchdog import Watchdog


class Execution:
    """Runs the operations of one group of ranks, in the order that all of them have.

    Args:
        in_flight: Where the operations are found.
        collectives: Run the operations; nobody else may use them.
        members: The ranks of the group.
        watch: Is told while an operation runs.
        link: Where the ranks are in step.
        timeline: Is told of every operation.
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
        self._runs = 0  # that all ranks have made, whether a timeline was kept or not
        self._decided = 0  # when the latest plan was known, for the timeline
        self._running: Key = 0
        self._watching = watch.guarded(
            lambda: f"its part of {in_flight.describe(self._running)}", members, remember=False, link=link
        )

    def note_plan(self) -> None:
        """A plan is known, for the timeline."""
        self._decided = self._timeline.clock()
        if self._timeline.mark_cycles:
            self._timeline.mark(Row.NEGOTIATION, "CYCLE", "CYCLE_START")

    def run(self, decision: Decision) -> None:
        """Run operations as one. An error is for their handles; only what interrupts the program is raised."""
        in_flight = self._in_flight
        entries = [in_flight.entries[key] for key in decision.keys]
        operations = [operation for operation, _ in entries]
        self._runs += 1
        collectives, run = self._collectives, None
        if self._timeline.on:
            records = [handle.record for _, handle in entries]
            run = RunRecord(self._timeline, records, self._decided, self._runs, self._members.ranks)
            if operations[0].device_kind is None:  # else the host takes no part in the exchange, and all is launching
                collectives = run.timed(collectives)
        try:
            self._running = decision.keys[0]
            with self._watching:
                results = type(operations[0]).run_together(operations, collectives)
        except BaseException as error:  # the watch has told the others, if they have to know
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
