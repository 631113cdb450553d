"""A `Model` in a process of its own. In the one that serves, it would take Python's lock from the requests for 30 ms at a time,
which is seen in their 99th percentile."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import traceback

from hvdlite.errors import HvdliteError
from hvdlite.serving import child
from hvdlite.serving.chooser.model import Model, Seen
from hvdlite.serving.chooser.objective import Choice
from hvdlite.serving.wire import frame, receive, send

_NICE = 19
"""What it computes can wait; what the server and the replicas compute cannot."""
_LONGEST = 30.0
"""Seconds that a choice may take."""
_LAST_WORDS = 2.0
"""Seconds that the process gets to end by itself."""


class ModelProcess:
    """The process, as the server sees it. It is started by the first call of `update`, and again after it has ended.

    Args:
        model: The model, which has seen nothing yet. The process gets a copy.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None

    def update(self, seen: Seen, now: float) -> Choice | None:
        """Let the model learn, and return its choice. See `Model.update`.

        Raises:
            HvdliteError: The process has ended, or does not answer, or has failed. The next call starts another one.
        """
        try:
            line = self._line or self._start()
            send(line, frame((seen, now)))
            answer, _ = receive(line)
        except (OSError, EOFError) as error:
            raise HvdliteError(
                f"the process that chooses the wait {self.close()} ({error!r}); another one is started."
            ) from error
        if isinstance(answer, str):
            raise HvdliteError(f"the process that chooses the wait has failed:\n{answer}")
        choice: Choice | None = answer
        return choice

    def hang_up(self) -> None:
        """End the wait of another thread in `update`."""
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)

    def close(self) -> str:
        """End the process, and return in words how it has ended."""
        line, process = self._line, self._process
        self._line = self._process = None
        if line is not None:
            line.close()
        if process is None:
            return "could not be started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"has ended with exit code {process.wait(_LAST_WORDS)}"
        process.kill()
        process.wait()
        return "did not answer"

    def _start(self) -> socket.socket:
        self._process, line = child.start(__name__, threads=1)
        self._line = line
        line.settimeout(_LONGEST)
        send(line, frame(self._model))
        return line


def main() -> None:
    """Be the process: answer until the server hangs up."""
    os.nice(_NICE)
    line = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):  # the server has gone
        model, _ = receive(line)
        while True:
            (seen, now), _ = receive(line)
            send(line, frame(_answer(model, seen, now)))


def _answer(model: Model, seen: Seen, now: float) -> Choice | str | None:
    try:
        return model.update(seen, now)
    except Exception:
        return traceback.format_exc()
