"""What a rank notes while it works, and the thread that writes it down.

Noting something appends a tuple to a queue. A thread writes what is in the queue twice a second, so that a rank which is
killed has lost half a second, and what it had written is readable.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.protocols import Transport
from hvdlite.timeline import rank_file
from hvdlite.timeline.clocks import Clock, measure, share_texts
from hvdlite.timeline.rows import OperationRecord, Row

_WRITE_SECONDS = 0.05
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make an encoder for each event


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
        self._events: deque[tuple[Row, str, str, int, int | None, Any]] = deque()
        self._submitted = 0
        self._steps = 0
        self._path = Path()
        self._job = ""
        self._file: TextIO | None = None
        self._file_lock = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._names: dict[str, str] = {}

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
            path: Of the trace; the ranks' files are in the folder ``<path>.ranks`` until they are merged.
            mark_cycles: Mark each plan of the controller by a moment "CYCLE_START".

        Raises:
            ArgumentError: Recording already; or a rank cannot write its file. Raised on all ranks.
        """
        if self.started:
            raise ArgumentError(f"a timeline is being written to {self._path} already: call stop_timeline() first.")
        told = share_texts(transport, json.dumps([os.path.abspath(path), secrets.token_hex(8), mark_cycles]))
        where, self._job, self.mark_cycles = json.loads(told[0])
        self._path = Path(where)
        problems = [problem for problem in share_texts(transport, self._open()) if problem]
        if problems:
            self._close()
            raise ArgumentError("cannot write a timeline: " + "; ".join(problems) + ".")
        self._events.clear()
        self._steps = 0
        self._note_clock(transport)
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
        self._note_clock(transport)
        self._close()
        share_texts(transport, "")  # all files are complete
        problem = share_texts(transport, self._merge() if self.rank == 0 else "")[0]
        if problem:
            raise HvdliteError(problem)

    def abandon(self) -> None:
        """Write what there is: this rank goes on without the others."""
        self._end_thread()
        self._close()

    def _open(self) -> str:
        """Open this rank's file. Returns what went wrong, or nothing."""
        folder = rank_file.folder_of(self._path)
        path = folder / rank_file.name_of_file(self.rank)
        try:
            if self.rank == 0 and self._path.is_dir():
                raise IsADirectoryError(None, "it is a folder, name a file", str(self._path))
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob("rank.*.json"):  # of an earlier job with more ranks
                number = left.name.split(".")[1]
                if number.isdecimal() and int(number) >= self.size:
                    left.unlink(missing_ok=True)
            self._file = path.open("w", encoding="utf-8")
            self._file.write("[\n")
            self._write_metadata(self._file)
            self._file.flush()
            if self.rank == 0:
                self._show(path)
        except OSError as error:
            return f"rank {self.rank}: {error.filename or path}: {error.strerror}"
        return ""

    def _show(self, path: Path) -> None:
        """Let rank 0's file be seen under the name of the trace too, until that takes its place: programs read it meanwhile."""
        self._path.unlink(missing_ok=True)
        try:
            os.link(path, self._path)
        except OSError:  # a file system that has no second names
            self._path.symlink_to(path)

    def _write_metadata(self, file: TextIO) -> None:
        host = socket.gethostname()
        about: dict[str, Any] = {
            "job": self._job,
            "rank": self.rank,
            "size": self.size,
            "host": host,
            "epoch": time.time(),
        }
        lines: list[tuple[int, str, dict[str, Any]]] = [
            (0, rank_file.RANK_LINE, about),
            (0, "process_name", {"name": f"rank {self.rank} ({host}, process {os.getpid()})"}),
            (0, "process_sort_index", {"sort_index": self.rank}),
            *((row, "thread_name", {"name": row.name.lower()}) for row in Row),
        ]
        for row, name, args in lines:
            file.write(rank_file.line(rank_file.metadata(name, self.rank, row, args)))

    def _note_clock(self, transport: Transport) -> None:
        measured = measure(transport, self.clock)
        args = {"at_us": measured.at / 1000, "offset_us": measured.offset / 1000, "error_us": measured.error / 1000}
        with self._file_lock:
            if self._file is not None:
                self._file.write(rank_file.line(rank_file.metadata(rank_file.CLOCK_LINE, self.rank, 0, args)))
                self._file.flush()

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

    def _close(self) -> None:
        with self._file_lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self) -> None:
        with self._file_lock:
            if self._file is None:
                return
            lines = []
            while self._events:
                lines.append(self._line(*self._events.popleft()))
            try:
                self._file.write("".join(lines))
                self._file.flush()
            except OSError as error:  # a full disk must not end a training job
                self._say(f"rank {self.rank} stops writing {self._file.name}: {error.strerror}")
                with contextlib.suppress(OSError):
                    self._file.close()
                self._file = None
                self.on = False

    def _line(self, row: Row, category: str, name: str, begin: int, end: int | None, args: Any) -> str:
        # By hand, for json.dumps takes three times as long, and the program waits for the interpreter meanwhile.
        quoted = self._names.get(name)
        if quoted is None:
            quoted = json.dumps(name)
            if len(self._names) < 4096:
                self._names[name] = quoted
        what = '"ph":"i","s":"t"' if end is None else f'"ph":"X","dur":{max(0, end - begin) / 1000:.3f}'
        more = "" if args is None else f',"args":{_ENCODE(args)}'
        return (
            f'{{"name":{quoted},"cat":"{category}",{what},"ts":{begin / 1000:.3f},"pid":{self.rank},"tid":{int(row)}'
            f"{more}}},\n"
        )


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
