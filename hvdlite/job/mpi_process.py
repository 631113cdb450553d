"""The MPI launcher as a process of ours: its start, what it says, its end, and what it leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvdlite.job import failures
from hvdlite.job.output import Output
from hvdlite.job.ranks import Rank
from hvdlite.job.server import Server

_BANNER_SECONDS = 1.0  # how long the MPI launcher's own words are held back


class MpiProcess:
    """A running MPI launcher.

    Args:
        words: Its command line.
        environ: Its environment.
        server: Watches its pipes.
        output: Where its words go.
        verbose: Show everything it says, at once.
    """

    def __init__(
        self, words: Sequence[str], environ: Mapping[str, str], server: Server, output: Output, verbose: bool
    ) -> None:
        self._server = server
        self._output = output
        self._verbose = verbose
        self._name = os.path.basename(words[0])
        self._banner: list[tuple[float, bytes]] = []
        self._said = bytearray()  # the last that it printed
        # A session of its own: Ctrl-C then reaches hvdliterun alone, which ends the job in order.
        self._process = subprocess.Popen(
            words,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_end_with_hvdliterun(),
        )
        self._pipes = set()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._pipes.add(pipe.fileno())
            server.watch(pipe.fileno())

    @property
    def status(self) -> int | None:
        """How it ended, once it has ended and all that it said is read (negative: the signal that killed it)."""
        status = self._process.poll()
        return None if self._pipes else status

    def read(self, descriptor: int) -> None:
        """Take what it says on one of its pipes."""
        data = os.read(descriptor, 1 << 16)
        if not data:
            self._server.unwatch(descriptor)
            self._pipes.remove(descriptor)
            return
        self._said = (self._said + data)[-(1 << 16) :]
        if self._verbose:
            self._output.say(data.decode(errors="replace"))
        else:
            self._banner.append((time.monotonic(), data))

    def release_banner(self, everything: bool = False) -> None:
        """Show what it said a while ago, and did not only announce a failure that we explain better."""
        while self._banner and (everything or time.monotonic() - self._banner[0][0] > _BANNER_SECONDS):
            self._output.say(self._banner.pop(0)[1].decode(errors="replace"))

    def exit_code(self, status: int) -> int:
        """The exit code of a job that it ended."""
        # MPICH's launcher ends with code 9 for a rank killed by signal 9, and only its words tell.
        by_signal = re.search(rb"EXIT STRING: .*\(signal (\d+)\)", self._said)
        if self._was_told(status):
            return 128 + signal.SIGTERM
        return failures.exit_code(-int(by_signal[1]) if by_signal else status) or 1

    def _was_told(self, status: int) -> bool:
        """Whether it ended as Open MPI's does after a SIGTERM: where something else ends it, it says what."""
        return self._name in ("mpirun", "mpiexec", "prterun") and status == 1 and not self._said.strip()

    def describe_end(self, status: int, unstarted: int, asked: Rank | None) -> str:
        """What to say of a job that it ended.

        Args:
            status: How it ended itself (negative: the signal that killed it).
            unstarted: So many ranks had not started.
            asked: The first rank, if any, whose guard got a SIGTERM: from it, which then says why, or from somebody else.
        """
        end = f"was killed by {failures.signal_name(-status)}" if status < 0 else f"ended with exit code {status}"
        when = f" before {unstarted} of the ranks had started" if unstarted else " before all ranks had finished"
        if self._was_told(status) and not unstarted:
            return f"{self._name} was ended by a signal such as SIGTERM: it told the ranks to end, and said nothing."
        said = "" if self._verbose else self._said.decode(errors="replace").strip()
        text = f"{self._name} {end}{when}." + (f" It said:\n{said}" if said else "")
        if asked is not None and b"MPI_ABORT" not in self._said:
            text += (
                f"\nBefore that, the guard process of {asked}, pid {asked.guard}, got a SIGTERM, and ended its rank."
            )
        return text

    def send_signal(self, number: int) -> None:
        """Send a signal to it and what it started, unless it has ended."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def stop_reading(self) -> None:
        """Wait for no more words: somebody else may hold its pipes open."""
        for descriptor in self._pipes:
            self._server.unwatch(descriptor)
        self._pipes.clear()

    def kill(self) -> None:
        """Kill it at once, in a signal handler: `subprocess` has locks that the interrupted code may hold."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process.pid, 0)
        self._remove_files()

    def sweep(self) -> None:
        """Kill it if need be, and remove what only it could have left: the name contains its process id."""
        if self._process.poll() is None:
            self.send_signal(signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._remove_files()

    def _remove_files(self) -> None:
        shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{self._process.pid}", ignore_errors=True)


def _end_with_hvdliterun() -> Callable[[], None] | None:
    """Have the kernel send SIGTERM to the MPI launcher should hvdliterun be killed."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
