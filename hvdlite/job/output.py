"""The ranks' output on ours: whole lines, tagged by rank, and progress bars that still redraw.

A line is written when it is complete. A line that stays incomplete for a moment (a prompt, a
progress bar) is shown as it is; if another rank then has something to say, it gives way: on a
terminal it is erased and drawn again below, elsewhere it is ended and goes on in the next line.

A file that takes no more (a full disk) is given up with a warning: the job matters more.
"""

from __future__ import annotations

import io
import os
import select
import time
from pathlib import Path
from typing import TextIO

_PATIENCE = 0.15
_ERASE_LINE = b"\r\x1b[K"
_FULL = 1 << 22  # bytes that a slow reader leaves waiting, before the ranks wait for it
_LONGEST_KEPT = 1 << 24  # an unfinished line that is longer is shown as it comes
_LONGEST_REDRAWN = 1 << 12
_BULK = 1 << 12  # bytes at once that are no progress bar: the end of their line is waited for ...
_BULK_PATIENCE = 2.0  # ... so long


class Sink:
    """Where output goes: a file descriptor that may be slow, written without ever waiting for it.

    Attributes:
        is_terminal: Whether it is one.
        is_broken: Its reader has gone.
        problem: Why it takes nothing more, in the system's words; empty while it does.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = bytearray()
        self.is_terminal = os.isatty(descriptor)
        self.is_broken = False
        self.problem = ""

    def write(self, data: bytes) -> None:
        """Write what the other end takes now, keep the rest."""
        self._waiting += data
        while self._waiting and select.select([], [self._descriptor], [], 0)[1]:
            self._write_some()

    def finish(self) -> None:
        """Write everything, however long it takes."""
        while self._waiting:
            select.select([], [self._descriptor], [])
            self._write_some()

    @property
    def backlog(self) -> int:
        """Bytes that wait to be written."""
        return len(self._waiting)

    def _write_some(self) -> None:
        # No more than a pipe takes at once after select said yes: never blocks.
        try:
            written = (
                len(self._waiting) if self.problem else os.write(self._descriptor, self._waiting[: select.PIPE_BUF])
            )
        except BrokenPipeError:
            self.is_broken = True
            written = len(self._waiting)
        except BlockingIOError:  # somebody else has made this end non-blocking
            written = 0
        except OSError as error:
            self.problem = error.strerror or str(error)
            written = len(self._waiting)
        del self._waiting[:written]


class TextSink(Sink):
    """A text stream that need not have a file descriptor: a notebook's output."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting = bytearray()
        self.is_terminal = False
        self.is_broken = False
        self.problem = ""

    def write(self, data: bytes) -> None:
        """Write all of it."""
        self._stream.write(data.decode(errors="replace"))
        self._stream.flush()


class _Source:
    """One stream of one rank: what it said of a line that it has not ended yet."""

    def __init__(self, tag: bytes, file: io.FileIO | None) -> None:
        self.tag = tag
        self.file = file
        self.line = bytearray()
        self.since = 0.0


class Output:
    """All ranks' output.

    Args:
        stdout: Where the ranks' stdout goes.
        stderr: Where their stderr goes.
        tagged: Whether each line starts with its rank.
        directory: Where each stream is also kept as it is, in ``rank.N/stdout`` and ``stderr``.
        timed: Whether each line starts with the time.
    """

    def __init__(
        self, stdout: Sink, stderr: Sink, tagged: bool, directory: Path | None = None, timed: bool = False
    ) -> None:
        self._sinks = {"stdout": stdout, "stderr": stderr}
        self._tagged = tagged
        self._timed = timed
        self._directory = directory
        self._sources: dict[tuple[int, str], _Source] = {}
        self._told: set[str] = set()
        self._full_at = 0.0
        # What is shown of an unfinished line. Two streams on the terminal share the one cursor.
        self._open: dict[str, tuple[_Source, str]] = {}
        self._screen = {name: name for name in self._sinks}
        if stdout.is_terminal and stderr.is_terminal:
            self._screen["stderr"] = "stdout"

    @property
    def is_busy(self) -> bool:
        """Whether something waits to be written."""
        return any(sink.backlog for sink in self._sinks.values())

    @property
    def hungry(self) -> list[str]:
        """The streams whose reader is not so slow that the ranks must wait for it."""
        return [name for name, sink in self._sinks.items() if sink.backlog <= _FULL]

    @property
    def is_broken(self) -> bool:
        """Whether a reader of ours has gone, as with ``hvdliterun ... | head -1``."""
        return any(sink.is_broken for sink in self._sinks.values())

    def feed(self, rank: int, name: str, data: bytes) -> None:
        """Take what a rank wrote to its stdout or stderr."""
        source = self._source(rank, name)
        now = time.monotonic() + (_BULK_PATIENCE if len(data) >= _BULK else 0.0)
        self._keep(source, data)
        ended, newline, rest = data.rpartition(b"\n")
        screen = self._screen[name]
        mine = self._open.get(screen, (None, ""))[0] is source
        if newline:
            # If the beginning is on the screen already, only what is new is added to it.
            if mine:
                del self._open[screen]
                self._write(name, self._retag(source, ended + newline, continued=True))
            else:
                self._aside(name, self._retag(source, bytes(source.line) + ended + newline))
            source.line, source.since = bytearray(rest), now
        elif mine:
            self._write(name, self._retag(source, data, continued=True))
            source.line += data
            _, redrawn, seen = source.line.rpartition(b"\r")  # what is still to be seen
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
        """Show unfinished lines that have waited long enough; call it now and then."""
        now = time.monotonic()
        if len(self.hungry) < len(self._sinks):
            self._full_at = now  # ranks wait too, perhaps in the middle of a line
        for (_, name), source in self._sources.items():
            screen = self._screen[name]
            if source.line and screen not in self._open and now - max(source.since, self._full_at) > _PATIENCE:
                self._show(screen, name, source)
        for name, sink in self._sinks.items():
            sink.write(b"")
            if sink.problem:
                self._warn(f"{name}: {sink.problem}; the ranks' output is not shown any more, the job goes on.")

    def say(self, text: str) -> None:
        """Write lines of our own to stderr, untagged."""
        self._aside("stderr", text.encode())

    def close(self) -> None:
        """End unfinished lines, and wait until everything is written."""
        for (_, name), source in self._sources.items():
            if source.line:
                if self._open.get(self._screen[name], (None, ""))[0] is source:
                    del self._open[self._screen[name]]
                    self._write(name, b"\n")
                else:
                    self._aside(name, self._retag(source, bytes(source.line) + b"\n"))
                source.line.clear()
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
        """Write whole lines while an unfinished one may be on the screen."""
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
        """Show a line before its end."""
        self._write(name, self._retag(source, bytes(source.line)))
        self._open[screen] = (source, name)

    def _keep(self, source: _Source, data: bytes) -> None:
        """Write to the file of this stream, if there is one and it takes more."""
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
        """Put the tag where a line begins: at the start, and after each newline and carriage return."""
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
