"""The options of hvdliterun, in groups, and what argparse makes of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from hvdlite.launch.arguments import Parser, add_completion, not_negative, port, positive, positive_int, whole
from hvdlite.launch.elastic.options import add_options
from hvdlite.launch.horovod_flags import FLAGS
from hvdlite.launch.job.mpi import PROGRAMS
from hvdlite.launch.where import add_where

_DESCRIPTION = """\
Run a program on several processes (ranks) that can talk to each other over MPI.

  hvdliterun -np 4 train.py                        four ranks on this machine
  hvdliterun -np 4 python -m package.train --lr 1  the same, as with python
  hvdliterun -np 8 -H node1:4,node2:4 train.py     two hosts, four ranks each, over ssh

When a rank fails (an exception, sys.exit(3), a crash, kill -9), all ranks are ended within three
seconds, its traceback is printed last, and hvdliterun has its exit code (128 + signal for signals).
"""

_OF_OTHERS = {
    **dict.fromkeys(("--nproc-per-node", "--num-processes", "--nprocs", "--ntasks", "--n", "--np"), "-np"),
    **dict.fromkeys(("--nnodes", "--num-machines", "--nodes"), "-H host1:4,host2:4"),
    **dict.fromkeys(("--master-addr", "--rdzv-endpoint", "--main-process-ip", "--hosts-file"), "-H host1:4,host2:4"),
    **dict.fromkeys(("--host", "--machinefile"), "-H host1:4,host2:4, or --hostfile"),
    "--timeline": "--timeline-filename",
    "--log-dir": "--output-filename",
}
"""Options of torchrun, mpirun, srun, Accelerate, and what is typed for those of horovodrun."""

_EPILOG = """\
"python" and "python3" mean the interpreter that hvdliterun itself runs with; give a path for another.
Other commands (a shell script, a compiled program) are run as they are. They are watched in the
same way, but cannot tell more than their exit code: there is no traceback at the end, and "finished"
means exit code 0.

All environment variables are forwarded to the ranks. Standard input is not: ranks read end of file.
All hosts need the same Python environment and program under the same paths.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of hvdliterun's arguments."""
    parser = _Parser(
        prog="hvdliterun",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.of_others = _OF_OTHERS
    add = parser.add_argument
    add("-v", "--version", action="store_true", help="print the version, and leave")
    add("-cb", "--check-build", action="store_true", help="print what is installed and found, and leave")
    add("--doctor", action="store_true", help="run hvdlite doctor with the same ranks and hosts (hvdlite docs doctor)")
    add_completion(parser)
    _add_where(parser.add_argument_group("ranks and hosts"))
    _add_output(parser.add_argument_group("output"))
    _add_failures(parser.add_argument_group("failures"))
    elastic = parser.add_argument_group(
        "elastic jobs, which go on when ranks fail and hosts come or go (hvdlite docs elastic)"
    )
    add_options(elastic.add_argument)
    _add_settings(parser.add_argument_group("settings"))
    horovod = parser.add_argument_group("programs written for Horovod (hvdlite docs from_horovod)")
    horovod.add_argument("--horovod", action="store_true", help="their `import horovod` means hvdlite")
    for name, flag in FLAGS.items():
        horovod.add_argument(name, action=_Foreign, nargs=None if flag.takes_value else 0, help=argparse.SUPPRESS)
    add("command", nargs=argparse.REMAINDER, metavar="command ...", help="the program and its arguments")
    return parser


def _add_where(group: argparse._ArgumentGroup) -> None:
    add_where(group)
    add = group.add_argument
    add(
        "--binding-args", metavar="ARGS", default="", help="arguments for mpirun that bind the ranks, before --mpi-args"
    )
    add("--start-timeout", metavar="S", type=positive, default=30.0, help="seconds until all ranks run (30)")
    add(
        "--servers",
        metavar="N",
        type=positive_int,
        help="the last N ranks only serve parameters (hvdlite docs asynchronous)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--no-tag-output", action="store_true", help='no "[rank] " before each line (there is none with -np 1)')
    stamp = "--timestamps", "-prefix-timestamp", "--prefix-output-with-timestamp"
    add(*stamp, dest="prefix_timestamp", action="store_true", help="the time before each line")
    add("--console-rank", metavar="N", type=whole, help="show the output of rank N only")
    add("--output-filename", metavar="DIR", help="also keep each rank's output in DIR/rank.N/stdout and stderr")
    add(
        "--dashboard",
        metavar="PORT",
        nargs="?",
        const=0,
        type=port,
        help="show what the job does, on a page of 127.0.0.1 and by hvdlite top (hvdlite docs running)",
    )
    add("--verbose", action="store_true", help="show the mpirun command, and all that mpirun prints")


def _add_failures(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-restarts",
        metavar="N",
        type=whole,
        default=0,
        help="start the whole job again when it fails, N times at most (0)",
    )
    stalls = group.add_mutually_exclusive_group()
    stalls.add_argument(
        "--stall-check", action="store_true", help="report waits after 10 s, and end the job after 300 s (60, 1800)"
    )
    stalls.add_argument("--no-stall-check", action="store_true", help="neither report waits nor end the job for them")
    add("--stall-check-warning-time-seconds", metavar="S", type=positive, help="say who is missing after S (60)")
    add("--stall-check-shutdown-time-seconds", metavar="S", type=not_negative, help="end it after S (1800; 0: never)")


def _add_settings(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--fusion-threshold-mb", metavar="MB", type=not_negative, help="tensors fused into one exchange, at most")
    add("--autotune", action="store_true", help="search for the fastest way to exchange gradients in the first steps")
    add("--autotune-log-file", metavar="FILE", help="record that search in FILE, as CSV")
    add("--timeline-filename", metavar="FILE", help="write a timeline to FILE (see hvdlite docs timeline)")
    cycles = argparse.BooleanOptionalAction
    add("--timeline-mark-cycles", action=cycles, help="mark in it when the ranks agreed on what to run")


def flags() -> set[str]:
    """Return the flags of ``hvdliterun`` in all their spellings, without those that only horovodrun has."""
    return {flag for action in make_parser()._actions for flag in action.option_strings} - set(FLAGS)


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


class _Parser(Parser):
    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        return super().parse_args(_with_values(sys.argv[1:] if args is None else args, self), namespace)


def _with_values(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Settle the options whose values may be missing: argparse would take the program's name for one.

    ``--mpi`` is left out if no MPI's name follows, as in horovodrun, and ``--dashboard`` takes any port if no number follows.
    """
    rest = list(words)
    index = 0
    while index < len(rest) and rest[index].startswith("-") and rest[index] != "--":
        if rest[index] == "--mpi" and (index + 1 == len(rest) or rest[index + 1] not in PROGRAMS):
            del rest[index]
            continue
        if rest[index] == "--dashboard":
            has_value = rest[index + 1 : index + 2] and rest[index + 1].isdecimal()
            rest[index : index + 1 + bool(has_value)] = [f"--dashboard={rest[index + 1] if has_value else 0}"]
        action = parser._option_string_actions.get(rest[index].partition("=")[0])
        values = 0 if action is None or "=" in rest[index] else 1 if action.nargs is None else int(action.nargs)
        index += 1 + values
    return rest


def tell_of_foreign(names: Sequence[str]) -> None:
    """Print why flags of horovodrun have no effect: one line for all flags with the same reason."""
    reasons = dict.fromkeys(FLAGS[name].why for name in names)
    for why in reasons:
        same = dict.fromkeys(name for name in names if FLAGS[name].why == why)
        print(f"hvdliterun: {', '.join(same)}: no effect, {why}.", file=sys.stderr)
