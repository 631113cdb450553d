"""Runs the generations of an elastic job, one after another, as the policy decides."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Sequence
from types import FrameType

from hvdlite.errors import LaunchError
from hvdlite.launch.elastic.discovery import Discovery, Newcomers
from hvdlite.launch.elastic.janitor import Janitor
from hvdlite.launch.elastic.policy import End, Ended, Limits, Policy, Start, Wait
from hvdlite.launch.elastic.state_folder import StateFolder
from hvdlite.launch.job import failures, signals, ssh
from hvdlite.launch.job.failures import Failure
from hvdlite.launch.job.hosts import Host, UnreachableError, check_ranks_here, control_host, is_local
from hvdlite.launch.job.job import Job, JobSpec
from hvdlite.launch.job.mpi import Placement
from hvdlite.launch.job.output import Output
from hvdlite.launch.worker.shared_memory import new_directory
from hvdlite.launcher_link.generation import CommitId, Generation

_POLL_SECONDS = 0.1


class Supervisor:
    """A `Supervisor` runs one elastic job.

    Args:
        spec: The description of each generation, but for its hosts and the number of its ranks.
        limits: What the user allows.
        hosts: The hosts, or what asks a script for them.
        directory: Where each host keeps what is committed.
        output: Prints the output of the ranks.
        janitor: Removes that directory in the end.
        always_restart: Start all processes again after a failure, even if some could go on.
        state: The folder that keeps commits when the job is lost, and has those of an earlier start; None if there is none.

    Attributes:
        last: The generation that ran last, or runs; None before the first.
    """

    def __init__(
        self,
        spec: JobSpec,
        limits: Limits,
        hosts: Sequence[Host] | Discovery,
        directory: str,
        output: Output,
        janitor: Janitor,
        always_restart: bool = False,
        state: StateFolder | None = None,
    ) -> None:
        self._spec = spec
        self._policy = Policy(limits)
        self._discovery = hosts if isinstance(hosts, Discovery) else None
        if not isinstance(hosts, Discovery):
            self._policy.take_hosts(hosts)
        self._directory = directory
        self._state = state
        self._key = secrets.token_hex(32) if state is None else state.key
        self._output = output
        self._janitor = janitor
        self._always_restart = always_restart
        self._generation = 0
        self._said = ""
        self.last: Job | None = None
        self._committed = {} if state is None else state.restore(directory)
        self._earlier = max((each.generation for each in self._committed.values()), default=0)
        """How many generations earlier starts of this job have had."""
        self._failure: Failure | None = None
        self._interrupted: int | None = None
        self._waits_for = self._shared_directory = ""
        self._newcomers = Newcomers(self._can_run_ranks if spec.placement.by_ssh else None)

    def run(self) -> Failure | None:
        """Run the job to its end. Return the failure that has ended it, or None if all went well.

        Raises:
            LaunchError: The job cannot be started, and another try would not help.
        """
        try:
            with signals.handled_by(self._on_signal):  # while no generation runs, which handles them itself
                while not isinstance(step := self._next(), End):
                    if isinstance(step, Start):
                        self._run(step)
                    else:
                        self._wait(step)
        finally:
            if self._discovery is not None:
                self._discovery.close()
        return self._conclude(step)

    def _next(self) -> Start | Wait | End:
        if self._interrupted is not None:
            name = failures.signal_name(self._interrupted)
            self._failure = Failure(f"ended by {name}.", 128 + self._interrupted, time.time(), is_final=True)
            return End("it was interrupted")
        self._discover()
        return self._policy.next(time.monotonic())

    def _wait(self, step: Wait) -> None:
        if self._waits_for != step.why and (self._discovery is None or self._discovery.hosts is not None):
            self._waits_for = step.why
            self._output.say(f"hvdliterun: waiting for hosts: {step.why}.\n")
        self._output.tick()
        time.sleep(_POLL_SECONDS)

    def _discover(self) -> None:
        if self._discovery is not None:
            self._discovery.poll(time.monotonic())
            if self._discovery.hosts is not None:
                self._policy.take_hosts(self._discovery.hosts)
            elif self._discovery.problem:
                raise LaunchError(f"--host-discovery-script: {self._discovery.problem}.")

    # ---- one generation ----

    def _run(self, step: Start) -> None:
        self._waits_for = ""
        self._say_start(step)
        self._check_state(step)
        self._janitor.add(step.hosts)
        placement = dataclasses.replace(
            self._spec.placement,
            num_proc=step.num_proc,
            hosts=step.hosts,
            shared_directory=new_directory(self._spec.mpi.flavour, self._shared_directory),
        )
        self._shared_directory = placement.shared_directory
        if placement.is_local:
            check_ranks_here(step.num_proc)
        why_restart = self._why_restart(placement)
        spec = dataclasses.replace(
            self._spec, placement=placement, generation=self._describe(step.generation, not why_restart)
        )
        job = self.last = Job(spec, self._output, lambda: self._look(job))
        job.elastic.on_commit = self._on_commit
        if not why_restart:
            names = _names(step)
            job.survivors.allows = lambda ranks: self._policy.why_not_without([names[rank] for rank in ranks])
            job.survivors.grant = lambda losses: self._go_on(losses, names)
        try:
            failure = job.run()
        except UnreachableError as error:
            self._failure = Failure(str(error), 1, time.time())
            how = Ended(started=False, unreachable=frozenset(error.names))
        else:
            self._failure = failure
            how = self._judge(job, failure, step)
        self._output.end_lines()
        self._policy.ended(time.monotonic(), how)

    def _describe(self, number: int, outlives: bool) -> Generation:
        number += self._earlier
        self._generation = number
        calls = range(max(self._committed, default=-1) + 1)
        committed = tuple(self._committed.get(call, CommitId()) for call in calls)
        return Generation(number, self._key, self._directory, committed, outlives)

    def _check_state(self, step: Start) -> None:
        """Check that this host has what is committed, if it is to be kept in a folder."""
        if self._state is None or any(is_local(host.name) for host in step.hosts):
            return
        why = "--state: a rank must run on the host of hvdliterun, from whose memory commits are kept; "
        why += f"the ranks are on {','.join(map(str, step.hosts))}"
        if step.generation == 1:
            raise LaunchError(f"{why}. Start it on one of these.")
        self._output.say(f"hvdliterun: {why}. Until one runs here, nothing is kept.\n")

    def _why_restart(self, placement: Placement) -> str:
        """Say why the ranks of a generation cannot go on in their processes when others fail; empty if they can."""
        why = ""
        if self._always_restart:
            why = "--always-restart was given"
        elif self._spec.mpi.flavour != "openmpi":
            why = "that was tried with Open MPI only"
        elif not placement.is_local and len(placement.rank_counts) > 1:
            why = "the ranks are on several hosts"
        if why and why != self._said and self._spec.verbose:
            self._output.say(f"hvdliterun: after a failure all processes are started again: {why}.\n")
        self._said = why
        return why

    def _go_on(self, losses: Sequence[Failure], names: Sequence[str]) -> Generation:
        """Let the ranks that are left go on in their processes, as the generation that this returns."""
        lost = [names[failure.rank] for failure in losses if failure.rank is not None]
        number = self._policy.lose(time.monotonic(), lost, _cause(losses[0]))
        reason = "".join(failure.describe() for failure in losses)
        self._output.say(
            f"{reason}hvdliterun: {self._policy.present} ranks go on in their processes (number {self._policy.restarts}), "
            f"{self._from_where()}.\n"
        )
        return self._describe(number, outlives=True)

    def _from_where(self) -> str:
        newest = max(self._committed.values(), default=None)
        return f"from commit number {newest.number}" if newest else "from the beginning, as nothing was committed"

    def _say_start(self, step: Start) -> None:
        if self._policy.restarts == 0:
            return
        reason = self._failure.describe() if self._failure is not None else "hvdliterun: the hosts have changed.\n"
        on = ",".join(map(str, step.hosts))
        self._output.say(
            f"{reason}hvdliterun: start again (number {self._policy.restarts}) with {step.num_proc} ranks on {on}, "
            f"{self._from_where()}.\n"
        )

    def _look(self, job: Job) -> None:
        with contextlib.suppress(LaunchError):  # the script has been good before
            self._discover()
        if self._state is not None:
            self._state.look()
        now = time.monotonic()
        if self._newcomers.are_there(self._policy.newcomers(now)):
            if update := self._policy.update(now):
                job.elastic.tell(update)
        elif missing := self._newcomers.missing():
            self._policy.found_unreachable(now, missing)

    def _can_run_ranks(self, name: str) -> bool:
        """Tell whether a host answers ssh, has what ranks need, and can connect to this one."""
        placement, hosts = self._spec.placement, (Host(name, 1),)
        options = ssh.options(placement.ssh_port, placement.ssh_identity_file)
        try:
            address = control_host(hosts, placement.interfaces)
            ssh.check_hosts(hosts, options, self._spec.mpi.program, address, lambda _: None)
        except (LaunchError, OSError):
            return False
        return True

    def _on_commit(self, call: int, number: int) -> None:
        self._committed[call] = CommitId(self._generation, number)
        self._policy.committed()
        if self._state is not None:
            self._state.committed()

    def _judge(self, job: Job, failure: Failure | None, step: Start) -> Ended:
        """Say how a generation has ended: which of its hosts have failed, by the numbers of the ranks."""
        names = _names(step)
        lost = {
            rank.number for rank in job.ranks if rank.gone and not rank.exited and not rank.local and not rank.asked
        }
        failed = {failure.rank} if failure is not None and failure.rank is not None else set()
        if failure is not None and failure.consequence:  # of a rank that has left too early, say
            failed = {rank.number for rank in job.ranks if rank.finished} or failed
        return Ended(
            good=failure is None and not job.elastic.has_left,
            left=failure is None and job.elastic.has_left,
            started=not job.ranks.missing,
            failed=frozenset(names[number] for number in failed if number < len(names)),
            unreachable=frozenset(names[number] for number in lost),
            cause=None if failure is None else _cause(failure),
            final=failure is not None and failure.is_final,
        )

    # ---- the end ----

    def _conclude(self, end: End) -> Failure | None:
        if not end.why:
            return None
        failure = self._failure
        if failure is None:
            return Failure(f"the elastic job ends: {end.why}.", 1, time.time())
        if not failure.is_final:
            self._output.say(f"hvdliterun: the elastic job ends: {end.why}. The last failure:\n")
        return failure

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._interrupted = number


def _cause(failure: Failure) -> str | None:
    """Return the cause of a failure for the policy (see `Ended`)."""
    return None if failures.is_from_outside(failure) else failures.cause(failure)


def _names(step: Start) -> list[str]:
    """Return the host of each rank."""
    return [host.name for host in step.hosts for _ in range(host.slots)]
