"""hvdliterun prints the output of the ranks: whole lines, tagged by rank, and progress bars that still redraw.

A line is written when it is complete. A line that stays incomplete for 0.15 s (a prompt, a progress bar) is shown as it is.
If another rank then has a line to write, the incomplete line gives way: on a terminal it is erased and drawn again below;
elsewhere it is ended, and the rest of it goes to the next line.

A file that takes no more bytes (a full disk) is given up with a warning: the job matters more.
"""

from __future__ import annotations

import io
import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

_LINE_SECONDS = 0.15  # wait so long for the end of a line before it is shown incomplete
_ERASE_LINE = b"\r\x1b[K"
_FULL = 1 << 22  # if a slow reader leaves more bytes waiting, the ranks wait for it
_LONGEST_KEPT = 1 << 24  # an incomplete line with more bytes is shown as it comes
_LONGEST_REDRAWN = 1 << 12
_BULK = 1 << 12  # so many bytes at once are no progress bar, so their line gets more time to end
_BULK_SECONDS = 2.0  # the time that such a line gets to end


class Sink:
    """A file descriptor that output goes to. Its reader may be slow: `write` never waits for the reader.

    Attributes:
        is_terminal: The file descriptor is a terminal.
        is_broken: The reader has closed its end.
        problem: The system's message why the file takes no more bytes; empty as long as it takes them.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = bytearray()
        self.is_terminal = os.isatty(descriptor)
        self.is_broken = False
        self.problem = ""

    def write(self, data: bytes) -> None:
        """Write the bytes that the reader takes now, and keep the rest."""
        self._waiting += data
        while self._waiting and select.select([], [self._descriptor], [], 0)[1]:
            self._write_some()

    def finish(self) -> None:
        """Write everything, and wait for the reader as long as it takes."""
        while self._waiting:
            select.select([], [self._descriptor], [])
            self._write_some()

    @property
    def backlog(self) -> int:
        """Bytes that wait to be written."""
        return len(self._waiting)

    def _write_some(self) -> None:
        # After `select` said yes a pipe takes so many bytes at once, so this never blocks.
        try:
            written = (
                len(self._waiting) if self.problem else os.write(self._descriptor, self._waiting[: select.PIPE_BUF])
            )
        except BrokenPipeError:
            self.is_broken = True
            written = len(self._waiting)
        except BlockingIOError:  # another process has made this end non-blocking
            written = 0
        except OSError as error:
            self.problem = error.strerror or str(error)
            written = len(self._waiting)
        del self._waiting[:written]


class TextSink(Sink):
    """A text stream that output goes to, such as the output of a notebook. It need not have a file descriptor."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting = bytearray()
        self.is_terminal = False
        self.is_broken = False
        self.problem = ""

    def write(self, data: bytes) -> None:
        """Write all bytes at once, as text; bytes that are no UTF-8 are replaced."""
        self._stream.write(data.decode(errors="replace"))
        self._stream.flush()


class _Source:
    """The stdout or stderr of one rank, with the line that the rank has not ended yet."""

    def __init__(self, tag: bytes, file: io.FileIO | None) -> None:
        self.tag = tag
        self.file = file
        self.line = bytearray()
        self.since = 0.0


class Output:
    """The output of all ranks.

    Args:
        stdout: Gets the ranks' stdout.
        stderr: Gets the ranks' stderr.
        tagged: Start each line with the number of its rank.
        directory: A folder that keeps each stream unchanged too, in ``rank.N/stdout`` and ``rank.N/stderr``.
        timed: Start each line with the time.
        only: The rank whose output is shown; None for all. The folder has the output of all.

    Attributes:
        hears: Gets what the ranks write to stderr, in whole lines with the rank, and what hvdliterun itself says, with None.
    """

    def __init__(
        self,
        stdout: Sink,
        stderr: Sink,
        tagged: bool,
        directory: Path | None = None,
        timed: bool = False,
        only: int | None = None,
    ) -> None:
        self._sinks = {"stdout": stdout, "stderr": stderr}
        self._tagged = tagged
        self._timed = timed
        self._only = only
        self._directory = directory
        self._sources: dict[tuple[int, str], _Source] = {}
        self._told: set[str] = set()
        self.hears: Callable[[int | None, str], None] | None = None
        self._full_at = 0.0
        # The source of the incomplete line that is shown. Two streams on one terminal share its cursor.
        self._open: dict[str, tuple[_Source, str]] = {}
        self._screen = {name: name for name in self._sinks}
        if stdout.is_terminal and stderr.is_terminal:
            self._screen["stderr"] = "stdout"

    @property
    def is_busy(self) -> bool:
        """Whether bytes wait to be written."""
        return any(sink.backlog for sink in self._sinks.values())

    @property
    def not_full(self) -> list[str]:
        """The streams, "stdout" or "stderr", with at most 4 MiB waiting. The ranks must wait before they write to others."""
        return [name for name, sink in self._sinks.items() if sink.backlog <= _FULL]

    @property
    def is_broken(self) -> bool:
        """Whether the reader of a stream has closed it, as in ``hvdliterun ... | head -1``."""
        return any(sink.is_broken for sink in self._sinks.values())

    def feed(self, rank: int, name: str, data: bytes) -> None:
        """Take bytes that a rank wrote to its stdout or stderr (`name`)."""
        source = self._source(rank, name)
        now = time.monotonic() + (_BULK_SECONDS if len(data) >= _BULK else 0.0)
        self._keep(source, data)
        if self.hears is not None and name == "stderr" and b"\n" in data:
            self.hears(rank, (source.line + data[: data.rindex(b"\n")]).decode(errors="replace"))
        if self._only not in (None, rank):
            return
        ended, newline, rest = data.rpartition(b"\n")
        screen = self._screen[name]
        mine = self._open.get(screen, (None, ""))[0] is source
        if newline:
            # If the beginning of the line is shown already, only the new bytes are added.
            if mine:
                del self._open[screen]
                self._write(name, self._retag(source, ended + newline, continued=True))
            else:
                self._aside(name, self._retag(source, bytes(source.line) + ended + newline))
            source.line, source.since = bytearray(rest), now
        elif mine:
            self._write(name, self._retag(source, data, continued=True))
            source.line += data
            _, redrawn, seen = source.line.rpartition(b"\r")  # a carriage return hides what came before it
            if redrawn or len(seen) > _LONGEST_REDRAWN:
                source.line = seen[-_LONGEST_REDRAWN:]
        else:
            if not source.line or len(data) >= _BULK:
                source.since = now
            source.line += data
            if len(source.line) > _LONGEST_KEPT:
                self._aside(name, b"")
                self._show(screen, name, source)

    def tick(self) -> None:
        """Show incomplete lines that have waited long enough. The job calls this many times a second."""
        now = time.monotonic()
        if len(self.not_full) < len(self._sinks):
            self._full_at = now  # ranks wait too, perhaps in the middle of a line
        for (_, name), source in self._sources.items():
            screen = self._screen[name]
            if source.line and screen not in self._open and now - max(source.since, self._full_at) > _LINE_SECONDS:
                self._show(screen, name, source)
        for name, sink in self._sinks.items():
            sink.write(b"")
            if sink.problem:
                self._warn(f"{name}: {sink.problem}; the ranks' output is not shown any more, the job goes on.")

    def say(self, text: str) -> None:
        """Write lines of hvdliterun itself to stderr, without a tag."""
        if self.hears is not None:
            self.hears(None, text)
        self._aside("stderr", text.encode())

    def end_lines(self) -> None:
        """End incomplete lines: the ranks that wrote them have ended."""
        for (_, name), source in self._sources.items():
            if source.line:
                if self._open.get(self._screen[name], (None, ""))[0] is source:
                    del self._open[self._screen[name]]
                    self._write(name, b"\n")
                else:
                    self._aside(name, self._retag(source, bytes(source.line) + b"\n"))
                source.line.clear()

    def close(self) -> None:
        """End incomplete lines, and wait until everything is written."""
        self.end_lines()
        for source in self._sources.values():
            if source.file is not None:
                source.file.close()
                source.file = None
        for sink in self._sinks.values():
            sink.finish()

    def _source(self, rank: int, name: str) -> _Source:
        if (rank, name) not in self._sources:
            file = None
            if self._directory is not None:
                folder = self._directory / f"rank.{rank}"
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    file = open(folder / name, "wb", buffering=0)  # noqa: SIM115 (closed by `close`)
                except OSError as error:
                    self._not_kept(error)
            self._sources[rank, name] = _Source(b"[%d] " % rank if self._tagged else b"", file)
        return self._sources[rank, name]

    def _aside(self, name: str, lines: bytes) -> None:
        """Write whole lines, even if an incomplete line of another source is shown: that one gives way."""
        screen = self._screen[name]
        if screen not in self._open:
            self._write(name, lines)
            return
        source, its_name = self._open.pop(screen)
        if self._sinks[its_name].is_terminal:
            self._write(its_name, _ERASE_LINE)
            self._write(name, lines)
            source.line = source.line.rpartition(b"\r")[2]
            self._show(screen, its_name, source)
        else:
            self._write(its_name, b"\n")
            source.line.clear()
            self._write(name, lines)

    def _show(self, screen: str, name: str, source: _Source) -> None:
        """Show the incomplete line of a source."""
        self._write(name, self._retag(source, bytes(source.line)))
        self._open[screen] = (source, name)

    def _keep(self, source: _Source, data: bytes) -> None:
        """Write to the file that keeps this stream, if there is one and it takes more bytes."""
        view = memoryview(data)
        while source.file is not None and view:
            try:
                view = view[source.file.write(view) :]
            except OSError as error:
                source.file.close()
                source.file = None
                self._not_kept(error)

    def _not_kept(self, error: OSError) -> None:
        why = error.strerror or str(error)
        self._warn(f"--output-filename {self._directory}: {why}; output is not kept there any more, the job goes on.")

    def _warn(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.say(f"hvdliterun: {text}\n")

    def _retag(self, source: _Source, text: bytes, continued: bool = False) -> bytes:
        """Put the tag at the start of each line: at the start of the text, and after each newline and carriage return."""
        tag = f"{time.strftime('%Y-%m-%d %H:%M:%S')} ".encode() + source.tag if self._timed else source.tag
        if not tag or not text:
            return text
        text = text.replace(b"\r\n", b"\n")
        last = b"\n" if text.endswith(b"\n") else b""
        body = text.removesuffix(b"\n")
        if b"\r" not in body:
            return (b"" if continued else tag) + body.replace(b"\n", b"\n" + tag) + last
        lines = body.split(b"\n")
        for index, line in enumerate(lines):
            start = b"" if line.startswith(b"\r") or (continued and index == 0) else tag
            lines[index] = start + line.replace(b"\r", b"\r" + tag)
        return b"\n".join(lines) + last

    def _write(self, name: str, data: bytes) -> None:
        self._sinks[name].write(data)
