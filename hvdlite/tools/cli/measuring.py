"""The commands that measure: ``hvdlite advise`` and ``hvdlite doctor``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hvdlite.errors import ArgumentError
from hvdlite.launch.where import Where, add_where


def add_advise(commands: Any) -> None:
    """Add the command ``hvdlite advise``."""
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
    advise.set_defaults(action=run_advise)


def run_advise(options: argparse.Namespace) -> None:
    """Run ``hvdlite advise``."""
    from hvdlite.tools.advise import advise

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


def add_doctor(commands: Any) -> None:
    """Add the command ``hvdlite doctor``."""
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
    doctor.set_defaults(action=run_doctor)


def run_doctor(options: argparse.Namespace) -> int:
    """Run ``hvdlite doctor``, and return its exit code."""
    from hvdlite.tools.doctor import DoctorOptions, doctor

    return doctor(
        DoctorOptions(
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
