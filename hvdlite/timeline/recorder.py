"""What a rank notes while it works, and the thread that writes it down.

Noting something appends a tuple to a queue. A thread writes what is in the queue twice a second, so that a rank which is
killed has lost half a second, and what it had written is readable.
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
from hvdlite.timeline.rows import OperationRecord, Row
from hvdlite.timeline.writer import Event, RankFileWriter

_WRITE_SECONDS = 0.05


class Timeline:
    """The timeline of one rank, between `start` and `stop`.

    Whoever has something to note looks at `on` first, and that is all that it costs while no timeline is kept. Named
    operations are noted by the engine. An exchange of gradients is noted like this::

        with timeline.span(Row.PROGRAM, "WAIT", "gradients"):              # where the program waits for it
            record = BucketRecord(timeline, "bucket 3", step, nbytes, ranks) if timeline.on else None
            self._host.meet()
            if record is not None:
                record.ready()
            ...
            if record is not None:
                record.done()
        timeline.step()                                                    # a step ends here

    and anything else by `add`, `mark` or `span`. What has an equal name and ``args["number"]`` belongs together on all
    ranks: by that it is found who was late.

    Args:
        rank, size: This rank, and how many there are.

    Attributes:
        on: Whether this rank notes events now.
        started: Whether the ranks keep a timeline, the same on all.
        mark_cycles: Whether each plan of the controller is to be marked.
        clock: Nanoseconds; tests put another one here before `start`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.on = self.started = False
        self.mark_cycles = False
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
        """Note what lasted from `begin` to `end` (now, if None), nanoseconds of `clock`. `args` must not change later."""
        self._events.append((row, category, name, begin, self.clock() if end is None else end, args))

    def mark(self, row: Row, category: str, name: str, args: dict[str, Any] | None = None) -> None:
        """Note a moment: now."""
        self._events.append((row, category, name, self.clock(), None, args))

    def span(self, row: Row, category: str, name: str, **args: Any) -> contextlib.AbstractContextManager[None]:
        """Note how long the body of a with statement lasts; does nothing while no timeline is kept."""
        return _Span(self, row, category, name, args) if self.on else _NOTHING

    def step(self) -> None:
        """A training step ends here, and the next one begins; does nothing while no timeline is kept."""
        if not self.on:
            return
        self._steps += 1
        self.mark(Row.STEP, "STEP", f"end of step {self._steps}", {"number": self._steps})

    def submitted(self, kind: str, key: str | int, nbytes: int) -> OperationRecord:
        """An operation was submitted; `key` is its name, or its number if it has none, or -1 if there is only one such."""
        if isinstance(key, int):
            key = f"noname.{key}" if key >= 0 else ""
        self._submitted += 1
        name = f"{kind}.{key}" if key else kind
        record = OperationRecord(kind, name, self._submitted, nbytes, self.clock())
        self._events.append((Row.PROGRAM, "SUBMIT", name, record.submitted, None, {"operation": record.number}))
        return record

    def settled(self, record: OperationRecord, error: BaseException | None = None) -> None:
        """An operation is over without having run to its end: it needed nothing but agreement, or it failed."""
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
            transport: Nothing else may be sent on it meanwhile.
            path: The path of the trace. The files of the ranks are in the folder ``<path>.ranks`` until they are merged.
            mark_cycles: Mark each plan of the controller by a moment "CYCLE_START".

        Raises:
            ArgumentError: Recording already; or a rank cannot write its file. Raised on all ranks.
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
            HvdliteError: The merged trace could not be written. Raised on all ranks.
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
        """Write what there is: this rank goes on without the others."""
        self._end_thread()
        self._writer.close()

    def _merge(self) -> str:
        """On rank 0: make the trace of the ranks' files. Returns what went wrong, or nothing."""
        from hvdlite.timeline.merge import conclude  # not before a timeline is at its end

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
    """For `Timeline.span`."""

    __slots__ = ("_args", "_begin", "_category", "_name", "_row", "_timeline")

    def __init__(self, timeline: Timeline, row: Row, category: str, name: str, args: dict[str, Any]) -> None:
        self._timeline, self._row, self._category, self._name, self._args = timeline, row, category, name, args

    def __enter__(self) -> None:
        self._begin = self._timeline.clock()

    def __exit__(self, *_: object) -> None:
        self._timeline.add(self._row, self._category, self._name, self._begin, None, self._args or None)


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
