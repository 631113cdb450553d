"""A `Model` in a process of its own. In the one that serves, it would take Python's lock from the requests for 30 ms at a time,
which is seen in their 99th percentile."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from hvdlite.config import environment
from hvdlite.errors import HvdliteError
from hvdlite.serving.chooser.model import Model, Seen
from hvdlite.serving.chooser.objective import Choice
from hvdlite.serving.wire import frame, receive, send

_NICE = 19
"""What it computes can wait; what the server and the replicas compute cannot."""
_LONGEST = 30.0
"""Seconds that a choice may take."""
_LAST_WORDS = 2.0
"""Seconds that the process gets to end by itself."""


@dataclass(frozen=True)
class _Begin:
    max_batch: int
    replicas: int
    slo_p99: float | None


class ModelProcess:
    """The process, as the server sees it. It is started by the first call of `update`, and again after it has ended.

    Args:
        max_batch, replicas, slo_p99: The arguments of `Model`.
    """

    def __init__(self, max_batch: int, replicas: int, slo_p99: float | None) -> None:
        Model(max_batch, replicas, slo_p99)  # for its checks
        self._begin = _Begin(max_batch, replicas, slo_p99)
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
        ours, theirs = socket.socketpair()
        with theirs:
            root = str(Path(__file__).parent.parent.parent.parent)
            code = f"import sys; sys.path.append({root!r}); from hvdlite.serving.chooser.process import main; main()"
            self._line = ours
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"),
                start_new_session=True,  # Ctrl-C is for the server
            )
        ours.settimeout(_LONGEST)
        send(ours, frame(self._begin))
        return ours


def main() -> None:
    """Be the process: answer until the server hangs up."""
    os.nice(_NICE)
    line = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):  # the server has gone
        begin, _ = receive(line)
        model = Model(begin.max_batch, begin.replicas, begin.slo_p99)
        while True:
            (seen, now), _ = receive(line)
            send(line, frame(_answer(model, seen, now)))


def _answer(model: Model, seen: Seen, now: float) -> Choice | str | None:
    try:
        return model.update(seen, now)
    except Exception:
        return traceback.format_exc()
