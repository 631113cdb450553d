"""``hvdlite`` serves models, reads timelines of jobs, says what is wrong here, and which strategy a program should train with.

``hvdliterun`` starts jobs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.launch.where import Where, add_where
from hvdlite.serving import command as serving
from hvdlite.serving.bench import command as bench

_FAILED = 2


def _version() -> str:
    try:
        return importlib.metadata.version("hvdlite")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: running from its source)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hvdlite", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="command", required=True)
    timeline = commands.add_parser(
        "timeline", help="merge and read what HVDLITE_TIMELINE has written", allow_abbrev=False
    )
    actions = timeline.add_subparsers(metavar="action", required=True)
    merge = actions.add_parser(
        "merge",
        help="make one Chrome trace of the ranks' files, also those of a job that was killed",
        description="Make one Chrome trace, which ui.perfetto.dev and chrome://tracing open, of the files of the ranks.",
        allow_abbrev=False,
    )
    merge.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a folder TRACE.ranks, or files of ranks")
    merge.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="the trace to write")
    merge.set_defaults(action=_merge)
    summarize = actions.add_parser(
        "summarize",
        help="say who was late, and where the time of a step goes",
        description="Say which ranks were late, by how much, and where the time of a step goes.",
        allow_abbrev=False,
    )
    summarize.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a merged trace, or what merge takes")
    summarize.add_argument("--top", type=int, default=20, metavar="N", help="operations to name (20)")
    summarize.set_defaults(action=_summarize)
    _add_advise(commands)
    _add_doctor(commands)
    serving.add_command(commands)
    bench.add_command(commands)
    return parser


def _add_advise(commands: Any) -> None:
    advise = commands.add_parser(
        "advise",
        help="measure some steps of a training program, and say what each strategy would cost",
        description="Run a training program for some steps, and say what a step would cost with each strategy.",
        usage="hvdlite advise PROGRAM -np N [options] [-- arguments of the program]",
        allow_abbrev=False,
    )
    add = advise.add_argument
    add("program", metavar="PROGRAM", help="a Python file that trains with hvdlite_torch.DistributedOptimizer")
    add_where(advise)
    add(
        "--link", metavar="RATE[,LATENCY]", help='between the hosts, as "100mbit" or "10gbit,50us"; else it is measured'
    )
    add("--per-host", type=int, metavar="R", help="pretend R ranks on each host (1, with --link on one host)")
    add(
        "--strategies",
        nargs="+",
        default=[],
        metavar="NAME",
        help='such as "fp16", "powersgd:8", "localsgd:16" or "async:1"',
    )
    add("--steps", type=int, default=20, metavar="K", help="steps to measure (20)")
    add("--warm-up", type=int, default=5, metavar="K", help="steps before these (5)")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    add("--plot", type=Path, metavar="FILE", help="draw the time of a step by the bandwidth of the link")
    advise.set_defaults(action=_advise)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what is wrong with the installation, the hosts and the links between them, and what to do",
        description="Look at the installation, the hosts and the links between ranks, and say what to do. With a model, "
        "predict the time of its step on 1 to 1024 ranks. The exit code is 1 if training cannot run.",
        usage="hvdlite doctor [PROGRAM] [-np N] [options] [-- arguments of the program]",
        allow_abbrev=False,
    )
    add = doctor.add_argument
    add(
        "program",
        metavar="PROGRAM",
        nargs="?",
        help="a Python file that trains with hvdlite_torch.DistributedOptimizer",
    )
    add_where(doctor)
    add("--parameters", type=float, metavar="N", help="size of a model, in place of a program, such as 110e6")
    add("--step-seconds", type=float, metavar="S", help="time of its step on one rank, without an exchange")
    add(
        "--link",
        metavar="RATE[,LATENCY]",
        help='between hosts, as "25gbit,20us", for the prediction; else it is measured',
    )
    add("--skip", nargs="+", default=[], choices=["imports", "links", "operations"], help="what to leave out")
    add("--json", type=Path, metavar="FILE", help="write everything there too")
    add("--plot", type=Path, metavar="FILE", help="draw the links between the ranks")
    doctor.set_defaults(action=_doctor)


def _merge(options: argparse.Namespace) -> None:
    from hvdlite.timeline.merge import merge_files

    about = merge_files(options.paths, options.output)["otherData"]["hvdlite"]
    print(f"{options.output}: {len(about['ranks'])} of {about['size']} ranks")


def _summarize(options: argparse.Namespace) -> None:
    from hvdlite.timeline.merge import load
    from hvdlite.timeline.summary import summarize

    print(summarize(load(options.paths), options.top), end="")


def _advise(options: argparse.Namespace) -> None:
    from hvdlite.advise import advise

    for name in ("json", "plot"):  # an error comes now, not after the measurement
        path = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise ArgumentError(f"--{name} {path}: there is no folder {path.absolute().parent}.")
    if options.num_proc is None:
        raise ArgumentError("how many ranks? Give -np N, 2 or more.")
    found = advise(
        options.program,
        options.words,
        options.num_proc,
        link=options.link,
        per_host=options.per_host,
        strategies=options.strategies,
        steps=options.steps,
        warm_up=options.warm_up,
        launch=Where.of(options).words(),
    )
    print(found, end="")
    if options.json is not None:
        options.json.write_text(json.dumps(found.figures(), indent=2) + "\n")
    if options.plot is not None:
        found.plot(options.plot)
        print(f"the picture is in {options.plot}")


def _doctor(options: argparse.Namespace) -> int:
    from hvdlite.doctor import Options, doctor

    return doctor(
        Options(
            Where.of(options),
            options.program,
            options.words,
            options.parameters,
            options.step_seconds,
            options.link,
            options.skip,
            options.json,
            options.plot,
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``hvdlite`` with these arguments, by default those of the process, and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:end])
    options.words = given[end + 1 :]
    if options.words and options.action not in (_advise, _doctor):
        parser.error(f"{' '.join(options.words)}: only advise and doctor take the arguments of a program after --")
    try:
        return options.action(options) or 0
    except (HvdliteError, OSError) as error:
        print(f"hvdlite: {error}", file=sys.stderr)
        return _FAILED
