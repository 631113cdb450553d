"""Records of events that take some time: operations that run as one, and the exchange of a bucket of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlite.timeline.clocks import Clock
from hvdlite.timeline.rank_file import Row
from hvdlite.timeline.recorder import OperationRecord, Timeline


def _part(timeline: Timeline, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the argument of an event that names its ranks, if not all ranks take part in it."""
    return {} if len(ranks) == timeline.size else {"ranks": list(ranks)}


class RunRecord:
    """The record of one or several operations that run as one, made when they begin to run.

    Args:
        timeline: The timeline that receives the events.
        operations: The records of the operations. None stands for an operation that was submitted before the timeline began,
            or by other ranks only.
        decided: The time at which this rank heard that all ranks are ready, in nanoseconds of `Timeline.clock`.
        number: The number of this run, equal on all ranks.
        ranks: The ranks that take part.
    """

    def __init__(
        self,
        timeline: Timeline,
        operations: Sequence[OperationRecord | None],
        decided: int,
        number: int,
        ranks: Sequence[int],
    ) -> None:
        self._timeline, self._number = timeline, number
        where = _part(timeline, ranks)
        self._records = [record for record in operations if record is not None]
        self._calls: list[tuple[int, int]] = []
        self._begin = timeline.clock()
        for record in self._records:
            record.runs = True
            args = self._args([record])
            args["operation"] = record.number
            if len(operations) > 1:
                args["fused"] = len(operations)
            args |= where
            kind = record.kind.upper()
            timeline.add(Row.NEGOTIATION, f"NEGOTIATE_{kind}", record.name, record.submitted, decided, args)
            timeline.add(Row.QUEUE, "QUEUE", record.name, decided, self._begin, args)

    def timed(self, collectives: Any) -> Any:
        """Return an object to use instead of `collectives` while the operations run: it takes the time of each call."""
        return _Timed(collectives, self._calls, self._timeline.clock)

    def done(self) -> None:
        """Record that the operations have run, and how their time divides into copies and exchange."""
        if not self._records:
            return
        timeline, end = self._timeline, self._timeline.clock()
        more = len(self._records) - 1
        name = self._records[0].name + (f" and {more} more" if more else "")
        args = self._args(self._records)
        first, last = (self._calls[0][0], self._calls[-1][1]) if self._calls else (self._begin, end)
        if self._calls:
            timeline.add(Row.COPY, "MEMCPY_IN", name, self._begin, first, args)
            timeline.add(Row.COPY, "MEMCPY_OUT", name, last, end, args)
        timeline.add(Row.EXCHANGE, self._records[0].kind.upper(), name, first, last, args)

    def _args(self, records: Sequence[OperationRecord]) -> dict[str, Any]:
        nbytes = sum(record.nbytes for record in records)
        return {"number": self._number, **({"bytes": nbytes} if nbytes else {})}


_COLLECTIVES = frozenset({"allreduce", "adasum", "allgather", "broadcast", "alltoall", "reduce_scatter", "barrier"})


class _Timed:
    """A wrapper of collectives that measures the time of each collective call."""

    def __init__(self, collectives: Any, calls: list[tuple[int, int]], clock: Clock) -> None:
        self._collectives, self._calls, self._clock = collectives, calls, clock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._collectives, name)
        if name not in _COLLECTIVES:
            return found

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._clock()
            try:
                return found(*args, **kwargs)
            finally:
                self._calls.append((begin, self._clock()))

        return timed


class BucketRecord:
    """The record of the exchange of a bucket of gradients, made when this rank is ready for the exchange.

    Args:
        timeline: The timeline that receives the events.
        name: The name of the bucket, equal on all ranks.
        number: The number of the step, equal on all ranks.
        nbytes: The bytes of this rank's gradients.
        ranks: The ranks that take part.
    """

    __slots__ = ("_args", "_begin", "_name", "_ready", "_timeline")

    def __init__(self, timeline: Timeline, name: str, number: int, nbytes: int, ranks: Sequence[int]) -> None:
        self._timeline, self._name = timeline, name
        self._args = {"number": number, "bytes": nbytes, **_part(timeline, ranks)}
        self._begin = self._ready = timeline.clock()

    def ready(self) -> None:
        """Record that all ranks are ready."""
        self._ready = self._timeline.clock()
        if self._timeline.counts is not None:
            self._timeline.counts.ready()

    def done(self) -> None:
        """Record that the exchange is over."""
        if self._timeline.counts is not None:
            self._timeline.counts.done(self._args["bytes"])
        self._timeline.add(Row.NEGOTIATION, "NEGOTIATE_GRADIENTS", self._name, self._begin, self._ready, self._args)
        self._timeline.add(Row.EXCHANGE, "GRADIENTS", self._name, self._ready, None, self._args)
