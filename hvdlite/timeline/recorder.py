"""Records the events of a rank, and the thread that writes them to the rank's file.

To record an event is to append a tuple to a queue. A thread writes the queue to the file every `_WRITE_SECONDS`, so a rank that
is killed loses no more than the events of that time, and the rest of its file is readable.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.protocols import Transport
from hvdlite.timeline import rank_file
from hvdlite.timeline.clocks import Clock, measure, share_texts
from hvdlite.timeline.counts import Counts
from hvdlite.timeline.rank_file import Row
from hvdlite.timeline.writer import Event, RankFileWriter

_WRITE_SECONDS = 0.05


class OperationRecord:
    """The record of one named operation, made when the operation is submitted."""

    __slots__ = ("kind", "name", "nbytes", "number", "runs", "submitted")

    def __init__(self, kind: str, name: str, number: int, nbytes: int, submitted: int) -> None:
        self.kind, self.name, self.number, self.nbytes, self.submitted = kind, name, number, nbytes, submitted
        self.runs = False


class Timeline:
    """The timeline of one rank, between `start` and `stop`.

    Callers look at `on` before they record an event, so while no timeline is kept an event costs one look. The controller
    of a group records named operations. A gradient exchange is recorded like this::

        with timeline.wait("gradients"):                                   # where the program waits for the exchange
            record = BucketRecord(timeline, "bucket 3", step, nbytes, ranks) if timeline.on else None
            self._host.meet()
            if record is not None:
                record.ready()
            ...
            if record is not None:
                record.done()
        timeline.step()                                                    # a step ends here

    Anything else is recorded by `add`, `mark` or `span`. Events of several ranks with equal names and ``args["number"]``
    belong together: they show which rank was late.

    Args:
        rank: This rank.
        size: The number of ranks in the job.

    Attributes:
        on: Whether this rank records events now.
        started: Whether the ranks keep a timeline; equal on all ranks.
        mark_cycles: Whether each plan of the controller is marked.
        counts: What this rank has done, also while no timeline is kept; None if nobody looks at that.
        clock: The clock of the events, in nanoseconds. Tests set another one before `start`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.on = self.started = False
        self.mark_cycles = False
        self.counts: Counts | None = None
        self.clock: Clock = time.perf_counter_ns
        self._events: deque[Event] = deque()
        self._submitted = 0
        self._steps = 0
        self._path = Path()
        self._job = ""
        self._writer = RankFileWriter(rank, size)
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    # What the others call

    def add(
        self, row: Row, category: str, name: str, begin: int, end: int | None = None, args: dict[str, Any] | None = None
    ) -> None:
        """Record an event from `begin` to `end`, in nanoseconds of `clock`; None means now. `args` must not change later."""
        self._events.append((row, category, name, begin, self.clock() if end is None else end, args))

    def mark(self, row: Row, category: str, name: str, args: dict[str, Any] | None = None) -> None:
        """Record that something happens now and has no duration."""
        self._events.append((row, category, name, self.clock(), None, args))

    def span(self, row: Row, category: str, name: str, **args: Any) -> contextlib.AbstractContextManager[None]:
        """Record how long the body of a with statement lasts. Nothing is recorded while no timeline is kept."""
        return _Span(self, row, category, name, args) if self.on else _NOTHING

    def wait(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for code in which the program waits for an exchange.

        Args:
            name: The name of the event; empty if it is counted and not recorded.
        """
        return _NOTHING if self.counts is None and not self.on else _Wait(self, name)

    def step(self) -> None:
        """Count a training step that ends, and record that the next one begins."""
        if self.counts is not None:
            self.counts.step()
        if not self.on:
            return
        self._steps += 1
        self.mark(Row.STEP, "STEP", f"end of step {self._steps}", {"number": self._steps})

    def submitted(self, kind: str, key: str | int, nbytes: int) -> OperationRecord:
        """Record that an operation was submitted.

        Args:
            kind: The kind of the operation, such as "allreduce".
            key: The name of the operation; the number of an unnamed one, or -1 for a kind that needs no number.
            nbytes: The bytes of this rank's tensors.
        """
        if isinstance(key, int):
            key = f"noname.{key}" if key >= 0 else ""
        self._submitted += 1
        name = f"{kind}.{key}" if key else kind
        record = OperationRecord(kind, name, self._submitted, nbytes, self.clock())
        self._events.append((Row.PROGRAM, "SUBMIT", name, record.submitted, None, {"operation": record.number}))
        return record

    def settled(self, record: OperationRecord, error: BaseException | None = None) -> None:
        """Record the end of an operation that has not run to its end: it needed only negotiation, or it failed."""
        args: dict[str, Any] = {"operation": record.number}
        if error is not None:
            args["error"] = str(error)
        if record.runs:
            self.mark(Row.EXCHANGE, "FAILED", record.name, args)
            return
        self.add(Row.NEGOTIATION, f"NEGOTIATE_{record.kind.upper()}", record.name, record.submitted, None, args)

    # Start and stop: all ranks together

    def start(self, transport: Transport, path: str | os.PathLike[str], mark_cycles: bool) -> None:
        """Begin to record. All ranks of `transport` call this together; rank 0's arguments count.

        Args:
            transport: The transport over all ranks. Nothing else may be sent on it meanwhile.
            path: The path of the trace. The ranks' files are in the folder ``<path>.ranks`` until they are merged.
            mark_cycles: Whether to mark each plan of the controller by a moment "CYCLE_START".

        Raises:
            ArgumentError: A timeline is kept already, or a rank cannot write its file. All ranks raise it.
        """
        if self.started:
            raise ArgumentError(f"a timeline is being written to {self._path} already: call stop_timeline() first.")
        told = share_texts(transport, json.dumps([os.path.abspath(path), secrets.token_hex(8), mark_cycles]))
        where, self._job, self.mark_cycles = json.loads(told[0])
        self._path = Path(where)
        problems = [problem for problem in share_texts(transport, self._writer.open(self._path, self._job)) if problem]
        if problems:
            self._writer.close()
            raise ArgumentError("cannot write a timeline: " + "; ".join(problems) + ".")
        self._events.clear()
        self._steps = 0
        self._writer.note_clock(measure(transport, self.clock))
        self._wake.clear()
        self._thread = threading.Thread(target=self._run, name="hvdlite-timeline", daemon=True)
        self._thread.start()
        self.started = self.on = True

    def stop(self, transport: Transport) -> None:
        """End the recording, and merge the files of all ranks if rank 0 can read them. All ranks call this together.

        Raises:
            HvdliteError: Rank 0 could not write the merged trace. All ranks raise it.
        """
        self.started = False
        self._end_thread()
        self._writer.note_clock(measure(transport, self.clock))
        self._writer.close()
        share_texts(transport, "")  # all files are complete
        problem = share_texts(transport, self._merge() if self.rank == 0 else "")[0]
        if problem:
            raise HvdliteError(problem)

    def abandon(self) -> None:
        """End the recording on this rank alone: write the remaining events, and merge nothing."""
        self._end_thread()
        self._writer.close()

    def _merge(self) -> str:
        """Merge the ranks' files (on rank 0). Return what went wrong; the empty string if nothing did."""
        from hvdlite.timeline.merge import conclude  # imported only when a timeline ends: training does not need it

        try:
            remark = conclude(self._path, self.size, self._job)
        except (OSError, HvdliteError) as error:
            return f"the ranks' timelines are in {rank_file.folder_of(self._path)}, but they cannot be merged: {error}"
        if remark:
            self._say(remark)
        return ""

    def _say(self, text: str) -> None:
        print(f"hvdlite: timeline: {text}", file=sys.stderr, flush=True)

    # The thread that writes

    def _run(self) -> None:
        while not self._wake.wait(_WRITE_SECONDS):
            self._write()

    def _end_thread(self) -> None:
        self.on = False
        if self._thread is not None:
            self._wake.set()
            self._thread.join()
            self._thread = None
        self._write()

    def _write(self) -> None:
        problem = self._writer.write(self._events)
        if problem:
            self._say(problem)
            self.on = False


class _Span:
    """The context manager of `Timeline.span`: it records how long the body of the with statement lasts."""

    __slots__ = ("_args", "_begin", "_category", "_name", "_row", "_timeline")

    def __init__(self, timeline: Timeline, row: Row, category: str, name: str, args: dict[str, Any]) -> None:
        self._timeline, self._row, self._category, self._name, self._args = timeline, row, category, name, args

    def __enter__(self) -> None:
        self._begin = self._timeline.clock()

    def __exit__(self, *_: object) -> None:
        self._timeline.add(self._row, self._category, self._name, self._begin, None, self._args or None)


class _Wait:
    """The context manager of `Timeline.wait`: it counts how long the body lasts, and records it if a timeline is kept."""

    __slots__ = ("_counts", "_span")

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._counts = timeline.counts
        self._span = timeline.span(Row.PROGRAM, "WAIT", name) if name and timeline.on else _NOTHING

    def __enter__(self) -> None:
        self._span.__enter__()
        if self._counts is not None:
            self._counts.begin_wait()

    def __exit__(self, *error: Any) -> None:
        if self._counts is not None:
            self._counts.end_wait()
        self._span.__exit__(*error)


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
