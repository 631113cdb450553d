"""Writes a rank's own file of the timeline. `rank_file` describes the format."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

from hvdlite.timeline import rank_file
from hvdlite.timeline.clocks import Offset
from hvdlite.timeline.rank_file import Row

Event = tuple[Row, str, str, int, int | None, Any]
"""The row, category and name of an event, its begin and end in nanoseconds (end None: a moment), and its arguments."""

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make an encoder for each event


class RankFileWriter:
    """Writes the events of one rank. Any thread may call its methods.

    Args:
        rank: This rank.
        size: The number of ranks in the job.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}

    def open(self, trace: Path, job: str) -> str:
        """Begin the file of a new timeline.

        Args:
            trace: The path of the merged trace. Until the merge, rank 0's file is visible there too.
            job: The identifier of this recording, which tells its files from those of earlier ones in the same folder.

        Returns:
            What went wrong; the empty string if nothing did.
        """
        folder = rank_file.folder_of(trace)
        path = folder / rank_file.name_of_file(self._rank)
        try:
            if self._rank == 0 and trace.is_dir():
                raise IsADirectoryError(None, "it is a folder, name a file", str(trace))
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob("rank.*.json"):  # of an earlier job with more ranks
                number = left.name.split(".")[1]
                if number.isdecimal() and int(number) >= self._size:
                    left.unlink(missing_ok=True)
            self._file = path.open("w", encoding="utf-8")
            self._file.write("[\n")
            self._write_metadata(self._file, job)
            self._file.flush()
            if self._rank == 0:
                _show(path, trace)
        except OSError as error:
            return f"rank {self._rank}: {error.filename or path}: {error.strerror}"
        return ""

    def _write_metadata(self, file: TextIO, job: str) -> None:
        host = socket.gethostname()
        about: dict[str, Any] = {
            "job": job,
            "rank": self._rank,
            "size": self._size,
            "host": host,
            "epoch": time.time(),
        }
        lines: list[tuple[int, str, dict[str, Any]]] = [
            (0, rank_file.RANK_LINE, about),
            (0, "process_name", {"name": f"rank {self._rank} ({host}, process {os.getpid()})"}),
            (0, "process_sort_index", {"sort_index": self._rank}),
            *((row, "thread_name", {"name": row.name.lower()}) for row in Row),
        ]
        for row, name, args in lines:
            file.write(rank_file.line(rank_file.metadata(name, self._rank, row, args)))

    def note_clock(self, measured: Offset) -> None:
        """Write how this rank's clock differs from rank 0's."""
        args = {"at_us": measured.at / 1000, "offset_us": measured.offset / 1000, "error_us": measured.error / 1000}
        with self._lock:
            if self._file is not None:
                self._file.write(rank_file.line(rank_file.metadata(rank_file.CLOCK_LINE, self._rank, 0, args)))
                self._file.flush()

    def write(self, events: deque[Event]) -> str:
        """Take the events out of their queue and write them. Without an open file they stay in the queue.

        Returns:
            What went wrong, and then the file is closed; the empty string if nothing did.
        """
        with self._lock:
            if self._file is None:
                return ""
            lines = []
            while events:
                lines.append(self._line(*events.popleft()))
            try:
                self._file.write("".join(lines))
                self._file.flush()
            except OSError as error:  # a full disk must not end a training job
                problem = f"rank {self._rank} stops writing {self._file.name}: {error.strerror}"
                with contextlib.suppress(OSError):
                    self._file.close()
                self._file = None
                return problem
        return ""

    def close(self) -> None:
        """Close the file, if it is open."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

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
            f'{{"name":{quoted},"cat":"{category}",{what},"ts":{begin / 1000:.3f},"pid":{self._rank},"tid":{int(row)}'
            f"{more}}},\n"
        )


def _show(path: Path, trace: Path) -> None:
    """Make rank 0's file visible under the name of the trace, so that programs can read it until the merge replaces it."""
    trace.unlink(missing_ok=True)
    try:
        os.link(path, trace)
    except OSError:  # a file system without hard links
        trace.symlink_to(path)
