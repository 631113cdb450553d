"""The MPI launcher as a child process of hvdliterun: its start, its messages, its end, and the files that it leaves behind."""

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

from hvdlite.launch.job import failures
from hvdlite.launch.job.output import Output
from hvdlite.launch.job.ranks import Rank
from hvdlite.launcher_link.server import ControlServer

_BANNER_SECONDS = 1.0  # how long the MPI launcher's own messages are held back
_STRANGER = re.compile(rb"^\[[^\]\n]*:\d+\] PMIX ERROR: \S+ in file \S*/ptl_\S* at line \d+\n?", re.MULTILINE)
"""What PMIx says of a connection that is none of its job's: `ptl` is its layer of connections."""


class MpiProcess:
    """A running MPI launcher.

    Args:
        words: The command line of the launcher.
        environ: The environment of the launcher.
        server: Watches the launcher's stdout and stderr.
        output: Prints the messages of the launcher.
        verbose: Print every message at once. Otherwise messages are held back for 1 s, and a failing job does not print them.
    """

    def __init__(
        self, words: Sequence[str], environ: Mapping[str, str], server: ControlServer, output: Output, verbose: bool
    ) -> None:
        self._server = server
        self._output = output
        self._verbose = verbose
        self._name = os.path.basename(words[0])
        self._banner: list[tuple[float, bytes]] = []
        self._strangers = 0
        self._said = bytearray()  # the last 64 KiB that the launcher printed
        # The launcher gets a session of its own: Ctrl-C then reaches only hvdliterun, which ends the job in order.
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
        """The launcher's exit code, or -N if signal N killed it; None until it has ended and all its output is read."""
        status = self._process.poll()
        return None if self._pipes else status

    def read(self, descriptor: int) -> None:
        """Read the launcher's stdout or stderr, whichever `descriptor` is."""
        data = os.read(descriptor, 1 << 16)
        if not data:
            self._server.unwatch(descriptor)
            self._pipes.remove(descriptor)
            return
        if not self._verbose:
            data, strangers = _STRANGER.subn(b"", data)
            self._strangers += strangers
            if not data:
                return
        self._said = (self._said + data)[-(1 << 16) :]
        if self._verbose:
            self._output.say(data.decode(errors="replace"))
        else:
            self._banner.append((time.monotonic(), data))

    def release_banner(self, everything: bool = False) -> None:
        """Print the messages that have been held back for 1 s, or all.

        A failing job does not call this: hvdliterun explains the failure better than the launcher does.
        """
        while self._banner and (everything or time.monotonic() - self._banner[0][0] > _BANNER_SECONDS):
            self._output.say(self._banner.pop(0)[1].decode(errors="replace"))

    def tell_of_strangers(self) -> None:
        """Say how often something outside of the job has written to a port of the launcher, if anything has."""
        if self._strangers:
            self._output.say(
                f"hvdliterun: {self._name} has refused {self._strangers} connection{'s' * (self._strangers > 1)} from outside "
                "of this job to its own ports; the job is not affected.\n"
            )

    def exit_code(self, status: int) -> int:
        """Return the exit code of a job that the launcher ended with this status."""
        # MPICH's launcher ends with code 9 if signal 9 killed a rank. Only its messages tell that it was a signal.
        by_signal = re.search(rb"EXIT STRING: .*\(signal (\d+)\)", self._said)
        if self._was_told(status):
            return 128 + signal.SIGTERM
        return failures.exit_code(-int(by_signal[1]) if by_signal else status) or 1

    def _was_told(self, status: int) -> bool:
        """Tell whether the launcher ended as Open MPI's does after a SIGTERM: without a message about another reason."""
        return self._name in ("mpirun", "mpiexec", "prterun") and status == 1 and not self._said.strip()

    def describe_end(self, status: int, unstarted: int, asked: Rank | None) -> str:
        """Describe the end of a job that the launcher ended.

        Args:
            status: The launcher's exit code, or -N if signal N killed it.
            unstarted: The number of ranks that had not started.
            asked: The first rank whose guard got a SIGTERM; None if no guard got one. The launcher has sent it, and says why
                in its messages, or somebody else has.
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
        """Send a signal to the launcher and to its process group, unless the launcher has ended."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def stop_reading(self) -> None:
        """Read no more output of the launcher: another process may hold its pipes open."""
        for descriptor in self._pipes:
            self._server.unwatch(descriptor)
        self._pipes.clear()

    def kill(self) -> None:
        """Kill the launcher at once. A signal handler may call this: it uses no lock of `subprocess`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process.pid, 0)
        self._remove_files()

    def sweep(self) -> None:
        """Kill the launcher if it still runs, and remove its files. Their name holds the launcher's process id."""
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
    """Return a function for the child process: it has the kernel send the child SIGTERM if hvdliterun is killed."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
