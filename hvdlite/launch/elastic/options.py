"""The options of elastic jobs: their checks, and what they mean."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvdlite.errors import LaunchError
from hvdlite.launch.allocation import Hosts, choose_hosts, hosts_to_be_found
from hvdlite.launch.arguments import positive, positive_int, whole
from hvdlite.launch.elastic.discovery import Discovery, words_of
from hvdlite.launch.elastic.janitor import Janitor
from hvdlite.launch.elastic.policy import FRUITLESS, Limits
from hvdlite.launch.elastic.state_folder import StateFolder
from hvdlite.launch.elastic.supervisor import Supervisor
from hvdlite.launch.job import ssh
from hvdlite.launch.job.failures import Failure
from hvdlite.launch.job.hosts import Host, check_ranks_here, is_local
from hvdlite.launch.job.job import Job, JobSpec
from hvdlite.launch.job.mpi import without_worker
from hvdlite.launch.job.output import Output
from hvdlite.launch.worker.shared_memory import name_in_memory

_ONLY_ELASTIC = (
    "slots_per_host",
    "reset_limit",
    "elastic_timeout",
    "blacklist_cooldown_range",
    "commit_directory",
    "always_restart",
    "same_failure_limit",
    "state",
    "state_every",
)
_NAME = "hvdlite.commits."


def add_options(add: Callable[..., object]) -> None:
    """Add the options to a parser by its ``add_argument``, or that of a group of it."""
    add("--min-np", "--min-num-proc", metavar="N", type=positive_int, help="go on with N ranks or more (-np)")
    add("--max-np", "--max-num-proc", metavar="N", type=positive_int, help="use N ranks at most (all slots)")
    add("--host-discovery-script", metavar="SCRIPT", help='prints the hosts, as lines "host:slots", each second')
    add("--slots-per-host", metavar="N", type=positive_int, help='slots of a line "host" of that script (1)')
    add("--reset-limit", metavar="N", type=whole, help="start again N times at most (no limit)")
    add("--elastic-timeout", metavar="S", type=positive, help="wait S seconds for enough hosts (600)")
    add(
        "--blacklist-cooldown-range",
        metavar=("MIN", "MAX"),
        nargs=2,
        type=positive,
        help="set a host aside for MIN seconds after a failure, for MAX after several (10 300)",
    )
    add(
        "--always-restart",
        action="store_const",
        const=True,
        help="start all processes again after a failure, even if enough are left to go on",
    )
    add(
        "--same-failure-limit",
        metavar="N",
        type=positive_int,
        help="end after the same failure N times in a row before a commit (3)",
    )
    add("--commit-directory", metavar="DIR", help="keep what is committed in DIR on each host (/dev/shm)")
    add(
        "--state",
        metavar="DIR",
        help="keep commits in DIR too; the same command, started again, goes on from the last one",
    )
    add("--state-every", metavar="N", type=positive_int, help="keep each N-th commit in the folder of --state (1)")


def is_elastic(options: argparse.Namespace) -> bool:
    """Tell whether the options ask for an elastic job.

    Raises:
        LaunchError: An option of elastic jobs was given, and none that makes the job elastic.
    """
    if options.min_np is not None or options.max_np is not None or options.host_discovery_script is not None:
        return True
    if given := [name for name in _ONLY_ELASTIC if getattr(options, name) is not None]:
        raise LaunchError(
            f"--{given[0].replace('_', '-')} is for elastic jobs: give --min-np, --max-np or --host-discovery-script too."
        )
    return False


@dataclass(frozen=True)
class ElasticOptions:
    """The checked options of an elastic job.

    Attributes:
        limits: What the user allows.
        found: The hosts at the start, and how they are reached.
        script: The script that prints the hosts, and its arguments; empty if they are fixed.
        slots: The slots of a host for which the script prints no number.
        folder: The folder of what is committed, on each host; empty for memory.
        always_restart: Start all processes again after a failure, even if enough are left to go on.
        state: The folder that keeps commits when the job is lost; empty for none.
        state_every: Each so many commits, one is kept there.
    """

    limits: Limits
    found: Hosts
    script: Sequence[str]
    slots: int
    folder: str
    always_restart: bool
    state: str
    state_every: int

    def run(self, spec: JobSpec, output: Output) -> tuple[Job | None, Failure | None]:
        """Run the job, and remove from its hosts what it has committed.

        Returns:
            The last generation, None if none has started; and the failure that has ended the job, None if all went well.

        Raises:
            LaunchError: The job cannot be started, and another try would not help.
        """
        placement = spec.placement
        if self.folder:
            directory = os.path.join(os.path.abspath(self.folder), f"{_NAME}{os.getpid()}.{os.urandom(8).hex()}")
        else:
            directory = name_in_memory(_NAME)
        hosts: Discovery | tuple[Host, ...] = self.found.hosts
        if self.script:
            hosts = Discovery(
                self.script, self.slots, lambda why: output.say(f"hvdliterun: --host-discovery-script: {why}.\n")
            )
        options = ssh.options(placement.ssh_port, placement.ssh_identity_file) if placement.by_ssh else None
        with contextlib.ExitStack() as at_end:
            is_over = False
            state = (
                StateFolder(self.state, without_worker(spec.program), self.state_every, output.say)
                if self.state
                else None
            )
            if state is not None:
                state.start(directory)
            janitor = Janitor(directory, options, state)
            at_end.callback(self._clean_up, janitor, directory, output)  # after what is called back next
            if state is not None:
                at_end.callback(lambda: state.finish(is_over))
            supervisor = Supervisor(spec, self.limits, hosts, directory, output, janitor, self.always_restart, state)
            failure = supervisor.run()
            is_over = failure is None
        return supervisor.last, failure

    @staticmethod
    def _clean_up(janitor: Janitor, directory: str, output: Output) -> None:
        for name in janitor.finish():
            output.say(
                f"hvdliterun: host {name} does not answer, so what the job has committed may be left in its memory: "
                f"{directory}. Once the host is back: ssh {name} rm -r {directory}\n"
            )


def elastic_options(options: argparse.Namespace, environ: Mapping[str, str]) -> ElasticOptions:
    """Check the options of an elastic job.

    Raises:
        LaunchError: Options contradict each other, the hosts have too few slots, or the script or the folder does not exist.
    """
    if options.servers is not None:
        raise LaunchError(
            "--servers: a training with parameter servers cannot be elastic. Leave the elastic options out."
        )
    first = options.num_proc if options.num_proc is not None else options.min_np
    if first is None:
        raise LaunchError("how many ranks? Give -np N, or --min-np N.")
    fewest = options.min_np if options.min_np is not None else first
    most = options.max_np
    if not fewest <= first <= (most or first):
        raise LaunchError(
            f"-np {first}, --min-np {fewest}" + (f", --max-np {most}" if most else "") + ": expected min <= np <= max."
        )
    script: list[str] = []
    shortest, longest = options.blacklist_cooldown_range or (10.0, 300.0)
    if shortest > longest:
        raise LaunchError(f"--blacklist-cooldown-range {shortest:g} {longest:g}: expected the shorter time first.")
    if options.host_discovery_script is not None:
        if options.hosts is not None or options.hostfile is not None:
            raise LaunchError("--host-discovery-script, and -H or --hostfile: both name the hosts, give one.")
        found, script = hosts_to_be_found(environ), words_of(options.host_discovery_script)
    else:
        if options.slots_per_host is not None:
            raise LaunchError("--slots-per-host is for --host-discovery-script: give the slots with the hosts.")
        found = choose_hosts(options.hosts, options.hostfile, first, environ)
        if not found.hosts:
            here = Host("localhost", max(first, most or 0))
            found = Hosts((here,), found.source, found.scheduler, found.by_ssh)
        if all(is_local(host.name) for host in found.hosts):
            check_ranks_here(first)
    limits = Limits(
        first,
        fewest,
        most,
        options.elastic_timeout or 600.0,
        options.reset_limit,
        (shortest, longest),
        options.same_failure_limit or FRUITLESS,
    )
    if options.state_every is not None and not options.state:
        raise LaunchError("--state-every N is for --state DIR: give that too.")
    if options.commit_directory is not None and not os.path.isdir(options.commit_directory):
        raise LaunchError(f"--commit-directory {options.commit_directory}: there is no such folder.")
    return ElasticOptions(
        limits,
        found,
        script,
        options.slots_per_host or 1,
        options.commit_directory or "",
        bool(options.always_restart),
        options.state or "",
        options.state_every or 1,
    )
