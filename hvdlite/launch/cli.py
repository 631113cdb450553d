"""``hvdliterun``: its options, and the job that they describe."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hvdlite.errors import LaunchError
from hvdlite.job.hosts import check_ranks_here, is_local
from hvdlite.job.job import Job, JobSpec
from hvdlite.job.mpi import PROGRAMS, Placement, find_mpi, worker_command
from hvdlite.job.output import Output, Sink
from hvdlite.launch.allocation import Hosts, choose_hosts
from hvdlite.launch.check_build import check_build, own_version
from hvdlite.launch.elastic.janitor import Janitor
from hvdlite.launch.elastic.options import ElasticOptions, add_options, elastic_options, is_elastic
from hvdlite.launch.horovod import check_interpreter, job_environment
from hvdlite.launch.horovod_flags import FLAGS
from hvdlite.launch.where import Where, add_where, positive_int
from hvdlite.worker import orphans
from hvdlite.worker.shared_memory import new_directory

USAGE_ERROR = 2

_DESCRIPTION = """\
Run a program on several processes (ranks) that can talk to each other over MPI.

  hvdliterun -np 4 train.py                        four ranks on this machine
  hvdliterun -np 4 python -m package.train --lr 1  the same, as with python
  hvdliterun -np 8 -H node1:4,node2:4 train.py     two hosts, four ranks each, over ssh

When a rank fails (an exception, sys.exit(3), a crash, kill -9), all ranks are ended within three
seconds, its traceback is printed last, and hvdliterun has its exit code (128 + signal for signals).
"""

_EPILOG = """\
"python" and "python3" mean the interpreter that hvdliterun itself runs with; give a path for another.
Other commands (a shell script, a compiled program) are run as they are. They are watched in the
same way, but cannot tell more than their exit code: there is no traceback at the end, and "finished"
means exit code 0.

All environment variables are forwarded to the ranks. Standard input is not: ranks read end of file.
All hosts need the same Python environment and program under the same paths.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hvdliterun",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-v", "--version", action="store_true", help="print the version, and leave")
    add("-cb", "--check-build", action="store_true", help="print what is installed and found, and leave")
    add("--doctor", action="store_true", help="run hvdlite doctor with the same ranks and hosts (docs/doctor.md)")
    add_where(parser)
    add("--start-timeout", metavar="S", type=_positive, default=30.0, help="seconds until all ranks run (30)")
    add("--horovod", action="store_true", help="the program is written for Horovod: its `import horovod` means hvdlite")
    add(
        "--binding-args", metavar="ARGS", default="", help="arguments for mpirun that bind the ranks, before --mpi-args"
    )
    add("--verbose", action="store_true", help="show the mpirun command, and all that mpirun prints")
    add("--no-tag-output", action="store_true", help='no "[rank] " before each line (there is none with -np 1)')
    stamp = "-prefix-timestamp", "--prefix-output-with-timestamp"
    add(*stamp, dest="prefix_timestamp", action="store_true", help="the time before each line")
    add("--output-filename", metavar="DIR", help="also keep each rank's output in DIR/rank.N/stdout and stderr")
    add(
        "--servers",
        metavar="N",
        type=positive_int,
        help="the last N ranks only serve parameters (docs/asynchronous.md)",
    )
    elastic = parser.add_argument_group(
        "elastic jobs, which go on when ranks fail and hosts come or go (docs/elastic.md)"
    )
    add_options(elastic.add_argument, positive_int, _whole, _positive)
    add("--fusion-threshold-mb", metavar="MB", type=_not_negative, help="tensors fused into one exchange, at most")
    add("--autotune", action="store_true", help="search for the fastest way to exchange gradients in the first steps")
    add("--autotune-log-file", metavar="FILE", help="record that search in FILE, as CSV")
    add("--timeline-filename", metavar="FILE", help="write a timeline to FILE (see docs/timeline.md)")
    cycles = argparse.BooleanOptionalAction
    add("--timeline-mark-cycles", action=cycles, help="mark in it when the ranks agreed on what to run")
    stalls = parser.add_mutually_exclusive_group()
    stalls.add_argument(
        "--stall-check", action="store_true", help="report waits after 10 s, and end the job after 300 s (60, 1800)"
    )
    stalls.add_argument("--no-stall-check", action="store_true", help="neither report waits nor end the job for them")
    add("--stall-check-warning-time-seconds", metavar="S", type=_positive, help="say who is missing after S (60)")
    add("--stall-check-shutdown-time-seconds", metavar="S", type=_not_negative, help="end it after S (1800; 0: never)")
    for name, flag in FLAGS.items():
        add(name, action=_Foreign, nargs=None if flag.takes_value else 0, help=argparse.SUPPRESS)
    add("command", nargs=argparse.REMAINDER, metavar="command ...", help="the program and its arguments")
    return parser


def flags() -> set[str]:
    """Return the flags of ``hvdliterun`` in all their spellings, without those that only horovodrun has."""
    return {flag for action in _parser()._actions for flag in action.option_strings} - set(FLAGS)


class _Foreign(argparse.Action):
    """The argparse action of a flag that only horovodrun has: it notes the flag for a message, or refuses it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        flag = FLAGS[str(option_string)]
        if not flag.is_taken:
            parser.error(f"{option_string} is horovodrun's: {flag.why}")
        namespace.foreign = [*(getattr(namespace, "foreign", None) or []), str(option_string)]


def _without_bare_mpi(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Leave out ``--mpi`` if no MPI's name follows, as in horovodrun: else it would take the program's name for one."""
    rest = list(words)
    index = 0
    while index < len(rest) and rest[index].startswith("-") and rest[index] != "--":
        if rest[index] == "--mpi" and (index + 1 == len(rest) or rest[index + 1] not in PROGRAMS):
            del rest[index]
            continue
        action = parser._option_string_actions.get(rest[index].partition("=")[0])
        values = 0 if action is None or "=" in rest[index] else 1 if action.nargs is None else int(action.nargs)
        index += 1 + values
    return rest


def _tell_of_foreign(names: Sequence[str]) -> None:
    """Print why flags of horovodrun have no effect: one line for all flags with the same reason."""
    reasons = dict.fromkeys(FLAGS[name].why for name in names)
    for why in reasons:
        same = dict.fromkeys(name for name in names if FLAGS[name].why == why)
        print(f"hvdliterun: {', '.join(same)}: no effect, {why}.", file=sys.stderr)


def _whole(text: str) -> int:
    return 0 if re.fullmatch("0+", text) else positive_int(text)


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def _positive(text: str) -> float:
    value = _not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``hvdliterun`` with these arguments, by default those of the process, and return its exit code."""
    _open_standard_streams()
    parser = _parser()
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(_without_bare_mpi(words, parser))
    _tell_of_foreign(getattr(options, "foreign", None) or [])
    if options.version:
        print(own_version())
        return 0
    if options.check_build:
        print(check_build())
        return 0
    if options.doctor:
        _become_doctor(options)
    output: Output | None = None
    janitor: Janitor | None = None
    words_at_end = ""
    try:
        elastic = elastic_options(options, os.environ) if is_elastic(options) else None
        spec = job_spec(options, os.environ, elastic)
        tagged = (elastic is not None or options.num_proc > 1) and not options.no_tag_output
        folder = make_folder(options.output_filename)
        orphans.adopt()
        output = Output(Sink(1), Sink(2), tagged, folder, timed=options.prefix_timestamp)
        if elastic is not None:
            supervisor, janitor = elastic.supervise(spec, output)
            failure = supervisor.run()
        else:
            job = Job(spec, output)
            failure = job.run()
            words_at_end = job.trainings.describe()
    except LaunchError as error:
        print(f"hvdliterun: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:  # while hosts are checked; once ranks start, the job takes the signal
        print("hvdliterun: ended by SIGINT, before any rank has started.", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        if janitor is not None:
            janitor.finish()
        if output is not None:
            orphans.end(0.0)
            output.close()
    sys.stderr.write(words_at_end)
    if failure is None:
        return 0
    sys.stderr.write(failure.describe())
    return failure.code


def _become_doctor(options: argparse.Namespace) -> NoReturn:
    """Become ``hvdlite doctor`` for the ranks that the options describe, and for the program if it is one of Python."""
    where = Where.of(options)
    words = [*(["-np", str(where.num_proc)] if where.num_proc else []), *where.words()]
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
