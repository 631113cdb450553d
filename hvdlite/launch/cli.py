"""``hvdliterun``: the job that its options describe, and how often it is started."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hvdlite.errors import ArgumentError, LaunchError
from hvdlite.launch.allocation import Hosts, choose_hosts
from hvdlite.launch.arguments import USAGE_ERROR
from hvdlite.launch.check_build import check_build, own_version
from hvdlite.launch.elastic.options import ElasticOptions, elastic_options, is_elastic
from hvdlite.launch.horovod import check_interpreter, job_environment
from hvdlite.launch.job.failures import Failure
from hvdlite.launch.job.hosts import check_ranks_here, is_local
from hvdlite.launch.job.job import Job, JobSpec
from hvdlite.launch.job.mpi import Placement, find_mpi, worker_command
from hvdlite.launch.job.output import Output, Sink
from hvdlite.launch.parser import make_parser, tell_of_foreign
from hvdlite.launch.where import Where, count_ranks
from hvdlite.launch.worker import orphans
from hvdlite.launch.worker.shared_memory import new_directory

if TYPE_CHECKING:
    from hvdlite.launch.dashboard.server import Dashboard


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``hvdliterun`` with these arguments, by default those of the process, and return its exit code."""
    _open_standard_streams()
    options = make_parser().parse_args(arguments)
    tell_of_foreign(getattr(options, "foreign", None) or [])
    if options.version:
        print(own_version())
        return 0
    if options.check_build:
        listed, works = check_build()
        print(listed)
        return 0 if works else 1
    if options.doctor:
        _become_doctor(options)
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    """Run the job that the options describe, print how it has failed, and return the exit code."""
    dashboards: list[Dashboard] = []
    try:
        code, words = _run_job(options, dashboards)
        sys.stderr.write(words)
        for dashboard in dashboards:
            dashboard.show_end(words, failed=code != 0)
    finally:
        for dashboard in dashboards:
            dashboard.close()
    return code


def _run_job(options: argparse.Namespace, dashboards: list[Dashboard]) -> tuple[int, str]:
    """Run the job that the options describe. Return the exit code, and what is to be printed last.

    Args:
        options: The options.
        dashboards: Gets the page of the job, if the options ask for one.
    """
    output: Output | None = None
    words_at_end = ""
    try:
        options.num_proc = count_ranks(Where.of(options), os.environ)
        elastic = elastic_options(options, os.environ) if is_elastic(options) else None
        spec = job_spec(options, os.environ, elastic)
        _check_output(options, elastic)
        tagged = (elastic is not None or options.num_proc > 1) and not options.no_tag_output
        folder = make_folder(options.output_filename)
        if options.dashboard is not None:
            from hvdlite.launch.dashboard.server import Dashboard  # few jobs need what it imports

            dashboards.append(Dashboard(shlex.join(options.command), options.dashboard))
            spec = dataclasses.replace(spec, look=dashboards[0].board.look)
        orphans.adopt()
        output = Output(Sink(1), Sink(2), tagged, folder, timed=options.prefix_timestamp, only=options.console_rank)
        if dashboards:
            output.say(f"hvdliterun: the page of this job: {dashboards[0].url} (in a terminal: hvdlite top)\n")
            output.hears = dashboards[0].board.hear
        if elastic is not None:
            _, failure = elastic.run(spec, output)
        else:
            failure, words_at_end = _run_again(spec, output, options.max_restarts)
    except (ArgumentError, LaunchError) as error:
        return USAGE_ERROR, f"hvdliterun: {error}\n"
    except KeyboardInterrupt:  # while hosts are checked, or between two starts; else the job takes the signal
        return 128 + signal.SIGINT, "hvdliterun: ended by SIGINT, while no rank was running.\n"
    finally:
        if output is not None:
            orphans.end(0.0)
            output.close()
    return (0, words_at_end) if failure is None else (failure.code, words_at_end + failure.describe())


def _run_again(spec: JobSpec, output: Output, restarts: int) -> tuple[Failure | None, str]:
    """Run a job, and again if it fails, up to so many times. Return the last failure, and what is to be said at the end."""
    for restart in range(restarts + 1):
        job = Job(spec, output)
        failure = job.run()
        if failure is None or failure.is_final or restart == restarts:
            break
        output.end_lines()
        output.say(f"{failure.describe()}hvdliterun: start again ({restart + 1} of {restarts}).\n")
        shared = new_directory(spec.mpi.flavour, spec.placement.shared_directory)
        spec = dataclasses.replace(spec, placement=dataclasses.replace(spec.placement, shared_directory=shared))
    return failure, job.trainings.describe()


def _check_output(options: argparse.Namespace, elastic: ElasticOptions | None) -> None:
    """Raise LaunchError if options contradict each other that are not about the job itself."""
    if options.console_rank is not None and elastic is None and options.console_rank >= options.num_proc:
        raise LaunchError(
            f"--console-rank {options.console_rank}: the job has ranks 0 to {options.num_proc - 1} (-np), so nothing would be "
            "shown."
        )
    if elastic is not None and options.max_restarts:
        raise LaunchError("--max-restarts is for jobs that are not elastic: elastic ones have --reset-limit N.")


def _become_doctor(options: argparse.Namespace) -> NoReturn:
    """Become ``hvdlite doctor`` for the ranks that the options describe, and for the program if it is one of Python."""
    where = Where.of(options)
    words = [*(["-np", str(where.num_proc or "auto")] if where.num_proc is not None else []), *where.words()]
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if command and re.fullmatch(r"python(\d+(\.\d+)?)?", os.path.basename(command[0])):
        command = command[1:]
    if command and command[0].endswith(".py"):
        words += [command[0], "--", *command[1:]]
    elif command:
        print(f"hvdliterun: {command[0]}: only a Python file can be measured, so it is left out.", file=sys.stderr)
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "hvdlite", "doctor", *words])


def _open_standard_streams() -> None:
    """Open stdin, stdout and stderr if hvdliterun was started without them (``>&-``): no socket may get their numbers."""
    for descriptor, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "r" if descriptor == 0 else "w", closefd=False))


def job_spec(options: argparse.Namespace, environ: Mapping[str, str], elastic: ElasticOptions | None = None) -> JobSpec:
    """Check the options of hvdliterun, and make a job of them.

    Args:
        options: The options.
        environ: The environment of the job.
        elastic: The options of elastic jobs, if the job is one. Its hosts and the number of its ranks are the first ones then.

    Raises:
        LaunchError: An option is missing, the hosts, the program or the MPI launcher cannot be used, or this process is a
            rank of a job itself.
    """
    check_not_nested(environ)
    num_proc = options.num_proc if elastic is None else elastic.limits.first
    if num_proc is None:
        raise LaunchError("how many ranks? Give -np N.")
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise LaunchError(f"what to run? Give a command: hvdliterun -np {num_proc} train.py")
    if options.servers is not None and options.servers >= num_proc:
        raise LaunchError(
            f"--servers {options.servers}: {num_proc} ranks (-np) leave no rank to train. Start more ranks, or fewer "
            "servers."
        )
    found = find_hosts(options.hosts, options.hostfile, num_proc, environ) if elastic is None else elastic.found
    program = worker_command(command)
    if options.horovod:
        check_interpreter(program)
        environ = job_environment(environ)
    mpi = find_mpi(options.mpi)
    placement = Placement(
        num_proc=num_proc,
        hosts=found.hosts,
        scheduler=found.scheduler,
        by_ssh=found.by_ssh,
        interfaces=options.network_interface,
        ssh_port=options.ssh_port,
        ssh_identity_file=options.ssh_identity_file,
        mpi_args=f"{options.binding_args} {options.mpi_args}".strip(),
        shared_directory=new_directory(mpi.flavour),
    )
    settings = {
        "HVDLITE_SERVERS": options.servers,
        "HVDLITE_FUSION_THRESHOLD": _bytes(options.fusion_threshold_mb),
        "HVDLITE_AUTOTUNE": "1" if options.autotune or options.autotune_log_file else None,
        "HVDLITE_AUTOTUNE_LOG": options.autotune_log_file,
        "HVDLITE_PULSE": None if options.dashboard is None else 1,
        "HVDLITE_TIMELINE": options.timeline_filename,
        "HVDLITE_TIMELINE_MARK_CYCLES": options.timeline_mark_cycles,
        **_stall_settings(options),
    }
    changes = {name: str(value) for name, value in settings.items() if value is not None}
    environ = {**environ, **found.environ, **changes}
    return JobSpec(mpi, placement, program, environ, options.start_timeout, options.verbose)


def _stall_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the stall check that the options ask for; None leaves a setting to the environment."""
    report, end = options.stall_check_warning_time_seconds, options.stall_check_shutdown_time_seconds
    disable = None
    if options.stall_check:
        disable = "0"
        report = 10.0 if report is None else report
        end = 300.0 if end is None else end
    elif options.no_stall_check:
        disable = "1"
    return {
        "HVDLITE_STALL_CHECK_DISABLE": disable,
        "HVDLITE_STALL_CHECK_TIME_SECONDS": report,
        "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": end,
    }


def _bytes(megabytes: float | None) -> int | None:
    return None if megabytes is None else int(megabytes * 2**20)


def check_not_nested(environ: Mapping[str, str]) -> None:
    """Raise LaunchError if this process is a rank of a job, or one of several that a launcher has started."""
    if environ.get("HVDLITE_CONTROL"):
        raise LaunchError(
            "this process is already a rank of a job (HVDLITE_CONTROL is set), and a rank cannot start another job. "
            "Call hvdliterun or hvdlite.run outside of it, or unset HVDLITE_CONTROL if the job is over."
        )
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and (environ.get("SLURM_PROCID") != "0" or not os.isatty(0)):  # of srun --pty only one task goes on
        raise LaunchError(
            f"srun has started {tasks} processes (SLURM_STEP_NUM_TASKS), and each would start the whole job. Start hvdliterun "
            "without srun in sbatch or salloc: it starts the ranks on all nodes by itself. Or start the program itself with "
            "srun --mpi=pmix."
        )


def find_hosts(hosts: str | None, hostfile: str | None, num_proc: int, environ: Mapping[str, str]) -> Hosts:
    """Find the hosts of a job as `choose_hosts` does; if they all are this machine, check its memory too.

    Raises:
        LaunchError: The list of hosts cannot be read, or the hosts cannot hold so many ranks.
    """
    found = choose_hosts(hosts, hostfile, num_proc, environ)
    if all(is_local(host.name) for host in found.hosts):
        check_ranks_here(num_proc)
    return found


def make_folder(path: str | None) -> Path | None:
    """Create the folder for the ranks' output files, and return its path; return None if no path is given.

    Raises:
        LaunchError: The folder cannot be created.
    """
    if path is None:
        return None
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--output-filename {path}: {error.strerror}.") from error
    return Path(path)
