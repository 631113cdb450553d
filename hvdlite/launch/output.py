"""The ranks' output on ours: whole lines, tagged by rank, and progress bars that still redraw.

A line is written when it is complete. A line that stays incomplete for a moment (a prompt, a
progress bar) is shown as it is; if another rank then has something to say, it gives way: on a
terminal it is erased and drawn again below, elsewhere it is ended and goes on in the next line.
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from typing import BinaryIO, TextIO

_PATIENCE = 0.15
_ERASE_LINE = b"\r\x1b[K"


class Sink:
    """Where output goes: a file descriptor that may be slow, written without ever waiting for it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = bytearray()
        self.is_terminal = os.isatty(descriptor)
        self.is_broken = False

    def write(self, data: bytes) -> None:
        """Write what the other end takes now, keep the rest."""
        self._waiting += data
        while self._waiting and select.select([], [self._descriptor], [], 0)[1]:
            self._write_some()

    def finish(self) -> None:
        """Write everything, however long it takes."""
        while self._waiting:
            self._write_some()

    @property
    def backlog(self) -> int:
        """Bytes that wait to be written."""
        return len(self._waiting)

    def _write_some(self) -> None:
        # No more than a pipe takes at once after select said yes: never blocks.
        try:
            written = os.write(self._descriptor, self._waiting[: select.PIPE_BUF])
        except BrokenPipeError:
            self.is_broken = True
            written = len(self._waiting)
        del self._waiting[:written]


class TextSink(Sink):
    """A text stream that need not have a file descriptor: a notebook's output."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting = bytearray()
        self.is_terminal = False
        self.is_broken = False

    def write(self, data: bytes) -> None:
        """Write all of it."""
        self._stream.write(data.decode(errors="replace"))
        self._stream.flush()


class _Source:
    """One stream of one rank: what it said of a line that it has not ended yet."""

    def __init__(self, tag: bytes, file: BinaryIO | None) -> None:
        self.tag = tag
        self.file = file
        self.line = b""
        self.since = 0.0


class Output:
    """All ranks' output.

    Args:
        stdout: Where the ranks' stdout goes.
        stderr: Where their stderr goes.
        tagged: Whether each line starts with its rank.
        directory: Where each stream is also kept as it is, in ``rank.N/stdout`` and ``stderr``.
    """

    def __init__(self, stdout: Sink, stderr: Sink, tagged: bool, directory: Path | None = None) -> None:
        self._sinks = {"stdout": stdout, "stderr": stderr}
        self._tagged = tagged
        self._directory = directory
        self._sources: dict[tuple[int, str], _Source] = {}
        # What is shown of an unfinished line. Two streams on the terminal share the one cursor.
        self._open: dict[str, tuple[_Source, str]] = {}
        self._screen = {name: name for name in self._sinks}
        if stdout.is_terminal and stderr.is_terminal:
            self._screen["stderr"] = "stdout"

    @property
    def is_full(self) -> bool:
        """Whether a reader of ours is so slow that the ranks had better wait."""
        return any(sink.backlog > 1 << 23 for sink in self._sinks.values())

    @property
    def is_broken(self) -> bool:
        """Whether a reader of ours has gone, as with ``hvdliterun ... | head -1``."""
        return any(sink.is_broken for sink in self._sinks.values())

    def feed(self, rank: int, name: str, data: bytes) -> None:
        """Take what a rank wrote to its stdout or stderr."""
        source = self._source(rank, name)
        if source.file is not None:
            source.file.write(data)
            source.file.flush()
        whole, newline, rest = (source.line + data).rpartition(b"\n")
        mine = self._open.get(self._screen[name], (None, ""))[0] is source
        if newline:
            # If the beginning is on the screen already, only what is new is added to it.
            shown = len(source.line) if mine else 0
            if mine:
                del self._open[self._screen[name]]
                self._write(name, self._retag(source, (whole + newline)[shown:], continued=True))
            else:
                self._aside(name, self._retag(source, whole + newline))
            source.line, source.since = rest, time.monotonic()
        else:
            if not source.line:
                source.since = time.monotonic()
            source.line = rest
            if mine:
                self._write(name, self._retag(source, data, continued=True))
                source.line = rest.rpartition(b"\r")[2]  # what is still to be seen

    def tick(self) -> None:
        """Show unfinished lines that have waited long enough; call it now and then."""
        for (_, name), source in self._sources.items():
            screen = self._screen[name]
            if source.line and screen not in self._open and time.monotonic() - source.since > _PATIENCE:
                self._write(name, self._retag(source, source.line))
                self._open[screen] = (source, name)
        for sink in self._sinks.values():
            sink.write(b"")

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
                    self._aside(name, self._retag(source, source.line + b"\n"))
                source.line = b""
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
                folder.mkdir(parents=True, exist_ok=True)
                file = open(folder / name, "wb")  # noqa: SIM115 (closed by `close`)
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
            self._write(its_name, self._retag(source, source.line))
            self._open[screen] = (source, its_name)
        else:
            self._write(its_name, b"\n")
            source.line = b""
            self._write(name, lines)

    def _retag(self, source: _Source, text: bytes, continued: bool = False) -> bytes:
        """Put the tag where a line begins: at the start, and after each newline and carriage return."""
        if not source.tag or not text:
            return text
        text = text.replace(b"\r\n", b"\n")
        lines = text.split(b"\n")
        ended = lines[-1] == b""
        for index, line in enumerate(lines):
            if index == len(lines) - 1 and ended:
                break
            start = b"" if continued and index == 0 else source.tag
            if line.startswith(b"\r") and start:
                start, line = b"", line
            lines[index] = start + line.replace(b"\r", b"\r" + source.tag)
        return b"\n".join(lines)

    def _write(self, name: str, data: bytes) -> None:
        self._sinks[name].write(data)
