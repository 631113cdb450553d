"""One job from start to end. The class `Job` starts the ranks, waits for failures, and ends everything in this order:

start ── all ranks said hello ── all ranks exited well, mpirun too ────────────────> code 0
                │
                └─ first failure ── 0.15 s ── "end" ── 1 s ── KILL ── mpirun TERM, KILL ─> its code
                   (or Ctrl-C)      for others        by the guards    should it linger
                                    to report

A rank that trains with a parameter server may have asked for time to save its parameters before "end", or may be one without
which the job goes on (`trainings.py`). The ranks of an elastic job may go on when one of them fails (`survivors.py`).
"""

from __future__ import annotations

import functools
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from hvdlite.config import Config
from hvdlite.errors import LaunchError
from hvdlite.launch.job import failures, signals, ssh
from hvdlite.launch.job.departure import SlowExit
from hvdlite.launch.job.failures import Failure
from hvdlite.launch.job.hosts import control_host
from hvdlite.launch.job.mpi import Mpi, Placement, command, environment
from hvdlite.launch.job.mpi_process import MpiProcess
from hvdlite.launch.job.output import Output
from hvdlite.launch.job.ranks import Ranks
from hvdlite.launch.job.reports import Reports
from hvdlite.launcher_link.generation import Generation
from hvdlite.launcher_link.link import SILENT_SECONDS
from hvdlite.launcher_link.server import STRANGERS, ControlServer
from hvdlite.launcher_link.session import ProtocolError

_POLL_SECONDS = 0.1
_OWN_FILES = 64  # files that hvdliterun has open besides its connections
_SETTLE_SECONDS = 0.15  # wait so long for more failures: a rank that failed because of another one may report first
_CAUSE_SECONDS = 0.5  # wait so long if only consequences of a failure are known yet
_GRACE_SECONDS = 1.0  # between TERM and KILL for the ranks, after a failure
_INTERRUPT_GRACE_SECONDS = 3.0  # between TERM and KILL for the ranks, after Ctrl-C
_LINGER_SECONDS = 0.5  # for the MPI launcher to end, once its ranks should be gone
_SUSPENDED_SECONDS = 1.0  # hvdliterun itself was stopped if so long has passed since it last looked


@dataclass(frozen=True)
class JobSpec:
    """The description of a job: what to run, and where.

    Attributes:
        mpi: The MPI launcher.
        placement: The number of ranks, and their hosts.
        program: The command that each rank starts.
        environ: The environment of the job.
        start_timeout: Seconds until every rank must have said hello.
        verbose: Show the command line of the MPI launcher, and everything that the launcher prints.
        function: The pickled function of `hvdlite.run`, which ranks fetch from the launcher; empty for programs.
        generation: Which generation of an elastic job this is; None if the job is not elastic.
        look: Is called with the job several times a second while it runs, for people who look at it; None if nobody does.
    """

    mpi: Mpi
    placement: Placement
    program: Sequence[str]
    environ: Mapping[str, str]
    start_timeout: float = 30.0
    verbose: bool = False
    function: bytes = b""
    generation: Generation | None = None
    look: Callable[[Job], None] | None = None


@dataclass
class _Ending:
    grace: float
    since: float = field(default_factory=time.monotonic)
    released: bool = False
    terminated: bool = False


class Job:
    """A `Job` runs one job, once.

    Args:
        spec: The description of the job.
        output: Prints the output of the ranks.
        look: Is called several times a second while the job runs.

    Attributes:
        num_proc: The number of ranks that the job has.
        ranks: The ranks that have said hello.
        elastic: What the ranks of an elastic job have said.
        survivors: Its ranks that go on when others fail.
        results: For each rank that has sent a result of `hvdlite.run`: whether its function returned, and the pickled value
            that the function returned or raised.
        trainings: The ranks without which the job has gone on, and what a rank has saved before the end.
    """

    def __init__(self, spec: JobSpec, output: Output, look: Callable[[], None] = lambda: None) -> None:
        self._spec = spec
        self._output = output
        self._look_elsewhere = look
        self.num_proc = spec.placement.num_proc
        self._settings = Config.from_env(spec.environ)
        self.ranks = self._ranks = Ranks(spec.placement.num_proc, self._settings.stopped_seconds)
        self._reports = Reports(
            self._ranks,
            output,
            self._fail,
            function=spec.function,
            verbose=spec.verbose,
            try_host=functools.partial(ssh.try_port, spec.placement.ssh_port),
        )
        self.results = self._reports.results
        self.trainings = self._reports.trainings
        self.elastic = self._reports.elastic
        self.survivors = self._reports.survivors
        self._failures: list[Failure] = []
        self._ending: _Ending | None = None
        self._interrupted: int | None = None
        self._launcher_ended: float | None = None
        self._slow_exit: SlowExit | None = None
        self._last_look = time.monotonic()

    def run(self) -> Failure | None:
        """Run the job to its end. Return the failure that ended the job, or None if all went well.

        Raises:
            LaunchError: A host cannot be reached or lacks something, this process may not open so many connections, or the
                MPI launcher's arguments cannot be split into words.
        """
        placement = self._spec.placement
        connections = placement.num_proc * (
            1 if self._spec.look is None else 2
        )  # of the guards; and of ranks, for pulses
        _allow_files(connections + STRANGERS + _OWN_FILES)
        self._server = ControlServer(_checked_address(self._spec, self._output.say))
        try:
            with signals.handled_by(self._on_signal):
                self._start()
                try:
                    self._watch()
                    self._sweep_elsewhere()
                finally:
                    self._sweep()
        finally:
            self._server.close()
        return self._conclude()

    # ---- start ----

    def _start(self) -> None:
        spec = self._spec
        environ = {**environment(spec.mpi, spec.placement, spec.environ), "HVDLITE_CONTROL": str(self._server.address)}
        if spec.generation is not None:
            environ["HVDLITE_GENERATION"] = str(spec.generation)
        words = command(spec.mpi, spec.placement, environ, spec.program, self._server.address.host)
        if spec.verbose:
            self._output.say(f"hvdliterun: {' '.join(words)}\n")
        self._process = MpiProcess(words, environ, self._server, self._output, spec.verbose)
        self._started = time.monotonic()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._interrupted is not None:
            # The second signal ends the job at once. The guards see the connection close, and kill their ranks.
            for each in signals.ENDS:  # a third signal would start this a second time
                signal.signal(each, signal.SIG_IGN)
            self._process.kill()
            self._sweep_here()
            os._exit(128 + self._interrupted)
        self._interrupted = number

    # ---- watch ----

    def _watch(self) -> None:
        while not self._is_over():
            wait = 0.01 if self._output.is_busy else _POLL_SECONDS
            messages, descriptors = self._server.poll(wait)
            for connection, message in messages:
                try:
                    self._reports.take(connection, message)
                except ProtocolError:
                    connection.refuse()
            for descriptor in descriptors:
                self._process.read(descriptor)
            if not self._failures and self._ending is None:
                self._process.release_banner()
            self._output.tick()
            for stream in self._output.not_full:
                self._ranks.acknowledge(stream)
            self._look()
            self._look_elsewhere()
            if self._spec.look is not None:
                self._spec.look(self)
            self._advance()

    def _is_over(self) -> bool:
        if self._process.status is None:
            return False
        return self._ranks.all_are(lambda rank: rank.gone) or self._lingered(2 * _LINGER_SECONDS)

    def _lingered(self, seconds: float) -> bool:
        return self._ending is not None and time.monotonic() - self._ending.since > self._ending.grace + seconds

    def _fail(
        self,
        text: str,
        code: int,
        rank: int | None = None,
        at: float | None = None,
        consequence: bool = False,
        is_final: bool = False,
    ) -> None:
        if self._ending is None:
            host = self._ranks.host_of(rank)
            self._failures += self.survivors.end()
            self._failures.append(Failure(text, code, at or time.time(), rank, host, consequence, is_final))
            self.trainings.is_ending = True

    def _look(self) -> None:
        """Notice what nobody reports: ranks that are stopped, that did not start, or that do not end."""
        now = time.monotonic()
        suspended = now - self._last_look > _SUSPENDED_SECONDS
        if suspended:
            self._started += now - self._last_look
        self._last_look = now
        for rank in self._ranks.stopped(now, suspended):
            text = f"{rank} is stopped ({failures.signal_name(rank.stop_signal)}).\n\n{rank.stack or ''}"
            failure = Failure(text, 128 + rank.stop_signal, time.time(), rank.number, rank.host)
            if not self._reports.go_on_without(failure):
                self._fail(text, failure.code, rank=rank.number)
        self.survivors.look(now)
        if self._output.is_broken:
            self._fail("nobody reads the output any more.", 128 + signal.SIGPIPE, is_final=True)
        self._check_start(now)
        self._check_launcher()
        if self._ranks.have_lost and self._ranks.are_complete and self._ending is None:
            self._ending = _Ending(_GRACE_SECONDS)  # the guards wait for that
        self._note_slow_exit(now)

    def _check_start(self, now: float) -> None:
        missing = self._ranks.missing
        if missing and now - self._started > self._spec.start_timeout:
            ranks = ", ".join(map(str, missing))
            self._fail(
                f"rank {ranks} did not start within {self._spec.start_timeout:g} s. "
                "Try --verbose, or a longer --start-timeout.",
                1,
            )

    def _check_launcher(self) -> None:
        """Fail if the MPI launcher has ended before its ranks: nobody else is left who would end the ranks."""
        status = self._process.status
        if status is None or self._ending is not None or self._ranks.are_complete:
            return
        if all(failure.consequence for failure in self._failures):
            # It may be the first to see that a host is gone. Its own words for that are of little use; the guards' connections
            # tell in a moment which host it is.
            self._launcher_ended = self._launcher_ended or time.monotonic()
            if time.monotonic() < self._launcher_ended + SILENT_SECONDS and any(
                not (rank.local or rank.gone or rank.exited) for rank in self._ranks
            ):
                return
            text = self._process.describe_end(
                status, unstarted=len(self._ranks.missing), asked=self._reports.first_asked
            )
            self._fail(text, self._process.exit_code(status))

    def _note_slow_exit(self, now: float) -> None:
        if self._failures or self._ending is not None or not self._ranks.are_finished:
            return
        if self._slow_exit is None:
            self._slow_exit = SlowExit(self._ranks, self._settings, self._output.say, now)
        if (failure := self._slow_exit.look(now)) is not None:
            self._fail(failure.text, failure.code, failure.rank)
        elif self._slow_exit.only_launcher_is_left:
            self._ending = _Ending(0.0)  # it does not end by itself

    # ---- end ----

    def _advance(self) -> None:
        """Take the next step of ending the job, if there is a reason to end it."""
        if self._ending is None:
            if self._interrupted is not None:
                self._begin_end(_INTERRUPT_GRACE_SECONDS)
            elif self._failures and self._settled() and not self.trainings.are_saving():
                self._begin_end(_GRACE_SECONDS)
            return
        over = self._ranks.all_are(lambda rank: rank.gone or rank.exited)
        if not self._ending.released and (over or self._lingered(0)):
            # The guards of ranks that failed are released last: when one guard leaves, the MPI launcher kills the others.
            self._ending.released = True
            self._ranks.send_end(self._ending.grace, exited=True)
        all_gone = self._ranks.all_are(lambda rank: rank.gone)
        if not self._ending.terminated and (
            self._lingered(0.1) or (all_gone and time.monotonic() - self._ending.since > 0.1)
        ):
            self._ending.terminated = True
            self._process.send_signal(signal.SIGTERM)
        elif self._lingered(_LINGER_SECONDS):
            self._process.send_signal(signal.SIGKILL)
            self._ranks.kill_guards()
            self._process.stop_reading()

    def _settled(self) -> bool:
        known = not all(failure.consequence for failure in self._failures)
        since = time.time() - min(failure.at for failure in self._failures)
        if not known and self._ranks.may_have_lost_a_host:  # a moment later its connections say so
            return since > SILENT_SECONDS
        return since > (_SETTLE_SECONDS if known else _CAUSE_SECONDS)

    def _begin_end(self, grace: float) -> None:
        self._ending = _Ending(grace)
        self._ranks.send_end(grace, exited=False)

    def _sweep(self) -> None:
        """Remove the files that the job left behind. Only this job could have left them: their names hold its process ids."""
        self._process.sweep()
        self._sweep_here()

    def _sweep_here(self) -> None:
        if self._spec.placement.shared_directory:
            shutil.rmtree(self._spec.placement.shared_directory, ignore_errors=True)

    def _sweep_elsewhere(self) -> None:
        """Remove the shared memory directory on other hosts if a guard there was killed: else the guards remove it."""
        placement = self._spec.placement
        if placement.by_ssh and any(rank.gone and not rank.exited and not rank.local for rank in self._ranks):
            options = ssh.options(placement.ssh_port, placement.ssh_identity_file)
            ssh.remove_elsewhere(placement.hosts, options, placement.shared_directory)

    def _conclude(self) -> Failure | None:
        self._process.tell_of_strangers()
        if self._interrupted is not None:
            name = failures.signal_name(self._interrupted)
            return Failure(f"ended by {name}.", 128 + self._interrupted, time.time(), is_final=True)
        if self._failures:
            return failures.first(self._failures)
        if not self._ranks.have_lost:  # else the launcher says that ranks have failed, which is known
            self._process.release_banner(everything=True)
        _tell_of_ranks_alone(self._spec, self._ranks, self._output)
        return None


def _tell_of_ranks_alone(spec: JobSpec, ranks: Ranks, output: Output) -> None:
    """Print a hint if every rank has run its Python program to the end without any use of MPI."""
    count = spec.placement.num_proc
    wanted = Config.from_env(spec.environ).advice and not spec.function
    if count > 1 and wanted and ranks.all_are(lambda rank: rank.used_mpi is False):
        output.say(
            f"hvdliterun: each of the {count} ranks has run the whole program alone: none has called hvdlite.init(), nor "
            "used MPI otherwise. See hvdlite docs torch_training or hvdlite docs keras for what a program needs; "
            "hvdlite migrate PROGRAM changes one for DDP, Horovod, tf.distribute or Accelerate; HVDLITE_ADVICE=0 if this is "
            "as it should be.\n"
        )


def _checked_address(spec: JobSpec, say: Callable[[str], None]) -> str:
    """Check that the hosts are fit for their ranks, and return the address of this machine that they can reach."""
    placement = spec.placement

    def check(address: str) -> None:
        if placement.by_ssh:
            options = ssh.options(placement.ssh_port, placement.ssh_identity_file)
            ssh.check_hosts(placement.hosts, options, spec.mpi.program, address, say)

    try:
        address = control_host(placement.hosts, placement.interfaces)
    except LaunchError:
        check("127.0.0.1")  # it says more, and of all hosts
        raise
    check(address)
    return address


def _allow_files(needed: int) -> None:
    """Raise this process's limit of open files to `needed`, if it is lower.

    Raises:
        LaunchError: The system does not allow so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard) or needed <= soft:
        return
    if needed > hard:
        raise LaunchError(
            f"a job of so many ranks needs {needed} open files in hvdliterun, and the limit is {hard} (ulimit -Hn): have it "
            "raised, or start fewer ranks."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
