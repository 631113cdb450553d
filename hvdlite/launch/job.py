"""One job from start to end: starts the MPI launcher, watches the ranks, ends and sweeps everything.

start ── all ranks said hello ── all ranks exited well, mpirun too ────────────────> code 0
                │
                └─ first failure ── 0.15 s ── "end" ── 1 s ── KILL ── mpirun TERM, KILL ─> its code
                   (or Ctrl-C)      for others        by the guards    should it linger
                                    to report
"""

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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from hvdlite.control import Message
from hvdlite.launch import failures
from hvdlite.launch.failures import Failure
from hvdlite.launch.hosts import check_reachable, control_host, ssh_options
from hvdlite.launch.mpi import Mpi, Placement, command, environment
from hvdlite.launch.output import Output
from hvdlite.launch.server import Connection, Server
from hvdlite.launch.worker import SHARED_DIRECTORY_PREFIX

_POLL_SECONDS = 0.1
_SETTLE_SECONDS = 0.15  # a rank that failed because of another one may report first
_CAUSE_SECONDS = 0.5  # the same, if only consequences of a failure are known yet
_GRACE_SECONDS = 1.0  # between TERM and KILL for the ranks, after a failure
_INTERRUPT_GRACE_SECONDS = 3.0  # the same, after Ctrl-C
_LINGER_SECONDS = 0.5  # for the MPI launcher, once its ranks should be gone
_STOPPED_SECONDS = 1.5
_SUSPENDED_SECONDS = 1.0
_EXIT_NOTE_SECONDS = 10.0
_BANNER_SECONDS = 1.0  # how long the MPI launcher's own words are held back


@dataclass(frozen=True)
class JobSpec:
    """What to run.

    Attributes:
        mpi: The MPI launcher.
        placement: How many ranks, and where.
        program: What each rank starts.
        environ: The environment of the job.
        start_timeout: Seconds until every rank must have said hello.
        verbose: Show the command, and everything that the MPI launcher prints.
        function: What ranks get that ask for their function.
    """

    mpi: Mpi
    placement: Placement
    program: Sequence[str]
    environ: Mapping[str, str]
    start_timeout: float = 30.0
    verbose: bool = False
    function: bytes = b""


@dataclass
class _Rank:
    connection: Connection
    host: str
    pid: int
    guard: int
    local: bool
    finished: bool = False
    exited: bool = False
    gone: bool = False
    reported: bool = False
    stopped_at: float | None = None
    stop_signal: int = signal.SIGSTOP


@dataclass
class _Ending:
    grace: float
    since: float = field(default_factory=time.monotonic)
    released: bool = False
    terminated: bool = False


class Job:
    """Runs one job. Use it once.

    Args:
        spec: What to run.
        output: Where the ranks' output goes.
    """

    def __init__(self, spec: JobSpec, output: Output) -> None:
        self.results: dict[int, tuple[bool, bytes]] = {}
        self._spec = spec
        self._output = output
        self._ranks: dict[int, _Rank] = {}
        self._failures: list[Failure] = []
        self._ending: _Ending | None = None
        self._interrupted: int | None = None
        self._banner: list[tuple[float, bytes]] = []
        self._said = bytearray()  # the last that the MPI launcher printed
        self._pipes: dict[int, str] = {}
        self._noted = False
        self._all_finished_at: float | None = None
        self._last_look = time.monotonic()

    def run(self) -> Failure | None:
        """Run to the end. Returns what went wrong, if anything.

        Raises:
            LaunchError: A host cannot be reached.
        """
        placement = self._spec.placement
        check_reachable(placement.hosts, ssh_options(placement.ssh_port, placement.ssh_identity_file))
        self._server = Server(control_host(placement.hosts, placement.interfaces))
        try:
            with self._signals():
                self._start()
                try:
                    self._watch()
                finally:
                    self._sweep()
        finally:
            self._server.close()
        return self._conclude()

    # ---- start ----

    def _start(self) -> None:
        spec = self._spec
        environ = {**environment(spec.mpi, spec.placement, spec.environ), "HVDLITE_CONTROL": str(self._server.address)}
        words = command(spec.mpi, spec.placement, environ, spec.program, self._server.address.host)
        if spec.verbose:
            self._output.say(f"hvdliterun: {' '.join(words)}\n")
        # A session of its own: Ctrl-C then reaches hvdliterun alone, which ends the job in order.
        self._process = subprocess.Popen(
            words,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_end_with_launcher(),
        )
        self._started = time.monotonic()
        assert self._process.stdout is not None and self._process.stderr is not None
        for name, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            os.set_blocking(pipe.fileno(), False)
            self._pipes[pipe.fileno()] = name
            self._server.watch(pipe.fileno())

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._interrupted is not None:
            # Again: at once. The guards see the connection close, and kill their ranks.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._sweep()
            os._exit(128 + self._interrupted)
        self._interrupted = number

    # ---- watch ----

    def _watch(self) -> None:
        while not self._is_over():
            wait = 0.01 if self._output.is_full else _POLL_SECONDS
            messages, descriptors = self._server.poll(wait)
            for connection, message in messages:
                self._on_message(connection, message)
            for descriptor in descriptors:
                self._on_launcher_output(descriptor)
            self._release_banner()
            self._output.tick()
            self._look()
            self._advance()

    def _is_over(self) -> bool:
        if self._process.poll() is None or self._pipes:
            return False
        return all(rank.gone for rank in self._ranks.values()) or self._lingered(2 * _LINGER_SECONDS)

    def _lingered(self, seconds: float) -> bool:
        return self._ending is not None and time.monotonic() - self._ending.since > self._ending.grace + seconds

    def _on_message(self, connection: Connection, message: Message) -> None:
        match message.kind:
            case "hello":
                self._on_hello(connection, message)
            case "report":
                connection.send("ok")
                self._fail(message.fields["text"], message.fields["code"], rank=message.fields["rank"])
            case "fetch":
                connection.send("function", self._spec.function)
            case "result":
                self.results[message.fields["rank"]] = (message.fields["ok"], message.payload)
                connection.send("ok")
            case _ if connection.rank is not None:
                self._on_rank(connection.rank, self._ranks[connection.rank], message)

    def _on_hello(self, connection: Connection, message: Message) -> None:
        fields = message.fields
        connection.rank = fields["rank"]
        local = connection.stream.getpeername()[0] == connection.stream.getsockname()[0]
        self._ranks[fields["rank"]] = _Rank(connection, fields["host"], fields["pid"], fields["guard"], local)
        if self._ending is not None:
            connection.send("end", grace=self._ending.grace)

    def _on_rank(self, number: int, rank: _Rank, message: Message) -> None:
        fields = message.fields
        match message.kind:
            case "output":
                self._output.feed(number, fields["stream"], message.payload)
            case "done":
                rank.finished = True
            case "failed":
                rank.reported = True
                text = fields["text"] or f"{self._who(number)} ended with exit code {fields['code']}.\n"
                self._fail(
                    text, fields["code"], rank=number, consequence=failures.is_consequence(fields.get("error", ""))
                )
            case "stopped":
                rank.stopped_at, rank.stop_signal = time.monotonic(), fields["signal"]
            case "continued":
                rank.stopped_at = None
            case "exit":
                rank.exited = True
                rank.finished = fields["finished"]
                self._on_exit(number, rank, fields["status"], fields["asked"], fields["trace"], fields["time"])
            case "gone":
                rank.gone = True
                if not rank.exited:  # perhaps by the MPI launcher, which then ends too and knows why
                    text = f"{self._who(number)} was killed, and its guard process with it."
                    self._fail(text, 137, rank=number, consequence=True)

    def _on_exit(self, number: int, rank: _Rank, status: int, asked: bool, trace: str, at: float) -> None:
        if rank.reported or (status == 0 and rank.finished):
            return
        if asked:  # the MPI launcher ended it, and has said why: MPI_Abort
            return
        text = failures.words(self._who(number), status, rank.finished and status != 0)
        if trace.strip():
            text = f"{text}\n\n{trace}"
        code = failures.exit_code(status) or 1
        # An exit code without a word is also how MPI libraries leave when another rank's connection broke.
        unexplained = status > 0 and not trace.strip()
        self._fail(text, code, rank=number, at=at if rank.local else None, consequence=unexplained)

    def _who(self, number: int) -> str:
        rank = self._ranks[number]
        return f"rank {number} ({rank.host}, pid {rank.pid})"

    def _fail(
        self, text: str, code: int, rank: int | None = None, at: float | None = None, consequence: bool = False
    ) -> None:
        if self._ending is None:
            host = self._ranks[rank].host if rank is not None and rank in self._ranks else ""
            self._failures.append(Failure(text, code, at or time.time(), rank, host, consequence))

    def _on_launcher_output(self, descriptor: int) -> None:
        data = os.read(descriptor, 1 << 16)
        if not data:
            self._server.unwatch(descriptor)
            del self._pipes[descriptor]
            return
        self._said = (self._said + data)[-(1 << 16) :]
        if self._spec.verbose:
            self._output.say(data.decode(errors="replace"))
        else:
            self._banner.append((time.monotonic(), data))

    def _release_banner(self, everything: bool = False) -> None:
        """Show what the MPI launcher says, unless it only announces a failure that we explain better."""
        if self._failures or self._ending is not None:
            return
        while self._banner and (everything or time.monotonic() - self._banner[0][0] > _BANNER_SECONDS):
            self._output.say(self._banner.pop(0)[1].decode(errors="replace"))

    def _look(self) -> None:
        """Notice what nobody reports: ranks that are stopped, that did not start, or that do not go."""
        now = time.monotonic()
        suspended = now - self._last_look > _SUSPENDED_SECONDS
        if suspended:
            self._started += now - self._last_look
        self._last_look = now
        for number, rank in self._ranks.items():
            if rank.local and not rank.exited and not rank.gone and _is_stopped(rank.guard):
                rank.stopped_at = rank.stopped_at or now
            if rank.stopped_at is not None and suspended:
                rank.stopped_at = now  # hvdliterun was stopped too: somebody paused everything
            if rank.stopped_at is not None and now - rank.stopped_at > _STOPPED_SECONDS:
                text = f"{self._who(number)} is stopped ({failures.signal_name(rank.stop_signal)})."
                self._fail(text, 128 + rank.stop_signal, rank=number)
        if self._output.is_broken:
            self._fail("nobody reads the output any more.", 128 + signal.SIGPIPE)
        self._check_start(now)
        self._check_launcher()
        self._note_slow_exit(now)

    def _check_start(self, now: float) -> None:
        missing = sorted(set(range(self._spec.placement.num_proc)) - set(self._ranks))
        if missing and now - self._started > self._spec.start_timeout:
            ranks = ", ".join(map(str, missing))
            self._fail(
                f"rank {ranks} did not start within {self._spec.start_timeout:g} s. "
                "Try --verbose, or a longer --start-timeout.",
                1,
            )

    def _check_launcher(self) -> None:
        """The MPI launcher is gone while ranks are not: nobody is left who would end them."""
        status = self._process.poll()
        if status is None or self._pipes or self._ending is not None:
            return
        if not all(failure.consequence for failure in self._failures):
            return
        done = [number for number, rank in self._ranks.items() if rank.exited or rank.gone]
        if len(done) == len(self._ranks) and self._is_complete():
            return
        self._fail(self._launcher_words(status), self._launcher_code(status))

    def _is_complete(self) -> bool:
        return len(self._ranks) == self._spec.placement.num_proc and all(
            rank.exited and rank.finished for rank in self._ranks.values()
        )

    def _launcher_code(self, status: int) -> int:
        # MPICH's launcher ends with code 9 for a rank killed by signal 9, and only its words tell.
        by_signal = re.search(rb"EXIT STRING: .*\(signal (\d+)\)", self._said)
        return failures.exit_code(-int(by_signal[1]) if by_signal else status) or 1

    def _launcher_words(self, status: int) -> str:
        name = os.path.basename(self._spec.mpi.program)
        end = f"was killed by {failures.signal_name(-status)}" if status < 0 else f"ended with exit code {status}"
        unstarted = self._spec.placement.num_proc - len(self._ranks)
        when = f" before {unstarted} of the ranks had started" if unstarted else " before all ranks had finished"
        said = "" if self._spec.verbose else self._said.decode(errors="replace").strip()
        return f"{name} {end}{when}." + (f" It said:\n{said}" if said else "")

    def _note_slow_exit(self, now: float) -> None:
        ranks = list(self._ranks.items())
        if (
            self._noted
            or self._ending is not None
            or len(ranks) < self._spec.placement.num_proc
            or not all(rank.finished for _, rank in ranks)
        ):
            return
        self._all_finished_at = self._all_finished_at or now
        if self._is_complete() and self._ending is None and now - self._all_finished_at > _EXIT_NOTE_SECONDS:
            self._ending = _Ending(0.0)  # the MPI launcher alone is left, and does not go by itself
        elif now - self._all_finished_at > _EXIT_NOTE_SECONDS:
            self._noted = True
            waiting = ", ".join(self._who(number) for number, rank in ranks if not rank.exited)
            self._output.say(
                f"hvdliterun: every rank's program has finished, but a thread or an exit handler keeps {waiting}.\n"
            )

    # ---- end ----

    def _advance(self) -> None:
        """Take the next step towards the end, where there is a reason to end."""
        if self._ending is None:
            if self._interrupted is not None:
                self._begin_end(_INTERRUPT_GRACE_SECONDS)
            elif self._failures and self._settled():
                self._begin_end(_GRACE_SECONDS)
            return
        if not self._ending.released and (
            all(rank.gone or rank.exited for rank in self._ranks.values()) or self._lingered(0)
        ):
            # Only now the guards of ranks that failed: when one leaves, the MPI launcher kills the others.
            self._ending.released = True
            self._send_end(exited=True)
        ranks_left = not all(rank.gone for rank in self._ranks.values())
        if not self._ending.terminated and (
            self._lingered(0.1) or (not ranks_left and time.monotonic() - self._ending.since > 0.1)
        ):
            self._ending.terminated = True
            self._signal_launcher(signal.SIGTERM)
        elif self._lingered(_LINGER_SECONDS):
            self._signal_launcher(signal.SIGKILL)
            for rank in self._ranks.values():
                if rank.local and not rank.gone:
                    _kill(rank.guard)
            for descriptor in list(self._pipes):
                self._server.unwatch(descriptor)
            self._pipes.clear()

    def _settled(self) -> bool:
        known = not all(failure.consequence for failure in self._failures)
        since = time.time() - min(failure.at for failure in self._failures)
        return since > (_SETTLE_SECONDS if known else _CAUSE_SECONDS)

    def _begin_end(self, grace: float) -> None:
        self._ending = _Ending(grace)
        self._send_end(exited=False)

    def _send_end(self, exited: bool) -> None:
        assert self._ending is not None
        for rank in self._ranks.values():
            if not rank.gone and rank.exited is exited:
                rank.connection.send("end", grace=self._ending.grace)

    def _signal_launcher(self, number: int) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _sweep(self) -> None:
        """Remove what only this job could have left: the names contain this job's process ids."""
        if self._process.poll() is None:
            self._signal_launcher(signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{self._process.pid}", ignore_errors=True)
        if self._spec.placement.shared_directory:
            shutil.rmtree(self._spec.placement.shared_directory, ignore_errors=True)

    def _conclude(self) -> Failure | None:
        if self._interrupted is not None:
            name = failures.signal_name(self._interrupted)
            return Failure(f"ended by {name}.", 128 + self._interrupted, time.time())
        if self._failures:
            return failures.first(self._failures)
        self._release_banner(everything=True)
        return None


def shared_directory(mpi: Mpi) -> str:
    """A name for Open MPI's shared memory of one job; each host's guards create it."""
    if mpi.flavour != "openmpi" or not os.path.isdir(os.path.dirname(SHARED_DIRECTORY_PREFIX)):
        return ""
    return f"{SHARED_DIRECTORY_PREFIX}{os.getpid()}.{os.urandom(4).hex()}"


def _end_with_launcher() -> Callable[[], None] | None:
    """Have the kernel send SIGTERM to the MPI launcher should hvdliterun be killed."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
