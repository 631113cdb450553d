"""``hvdlite``: the commands besides ``hvdliterun``.

measuring.py  the commands that measure: advise and doctor
pages.py      docs, which shows the pages of the documentation
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdlite.config import environment
from hvdlite.errors import HvdliteError
from hvdlite.launch.arguments import USAGE_ERROR, Parser, add_completion, positive_int
from hvdlite.launch.where import Where, count_ranks
from hvdlite.serving import command as serving
from hvdlite.serving.bench import command as bench
from hvdlite.tools.cli.measuring import add_advise, add_doctor, run_advise, run_doctor
from hvdlite.tools.cli.pages import add_docs
from hvdlite.tools.migrate.command import add_migrate

_DESCRIPTION = (
    "Serve models, read timelines of jobs, say what is wrong here, and which strategy a program should train with. "
    "hvdliterun starts jobs."
)


def _version() -> str:
    try:
        return importlib.metadata.version("hvdlite")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: running from its source)"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="hvdlite", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=_version())
    add_completion(parser)
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
    top = commands.add_parser(
        "top",
        help="what a running job of hvdliterun --dashboard does, in a terminal",
        description="Show a running job that was begun with hvdliterun --dashboard, until it ends or Ctrl-C.",
        allow_abbrev=False,
    )
    top.add_argument("process", nargs="?", type=positive_int, help="the process id of its hvdliterun (the last begun)")
    top.add_argument("--once", action="store_true", help="show it once, as without a terminal")
    top.set_defaults(action=_top)
    add_advise(commands)
    add_doctor(commands)
    env = commands.add_parser(
        "env",
        help="what is installed, and the settings that hold here: for a report of a problem",
        description="Print what is installed and found, and the settings that hold here, with where each comes from.",
        allow_abbrev=False,
    )
    env.set_defaults(action=_env)
    add_docs(commands)
    add_migrate(commands)
    compat = commands.add_parser(
        "compat",
        help="run a program written for Horovod, or say what of Horovod it uses, and whether it is here",
        add_help=False,
        allow_abbrev=False,
    )
    compat.add_argument("arguments", nargs=argparse.REMAINDER)
    serving.add_command(commands)
    bench.add_command(commands)
    return parser


def _merge(options: argparse.Namespace) -> None:
    from hvdlite.timeline.merge import merge_files

    about = merge_files(options.paths, options.output)["otherData"]["hvdlite"]
    print(f"{options.output}: {len(about['ranks'])} of {about['size']} ranks")


def _summarize(options: argparse.Namespace) -> None:
    from hvdlite.timeline.merge import load
    from hvdlite.timeline.summary import summarize

    print(summarize(load(options.paths), options.top), end="")


def _top(options: argparse.Namespace) -> None:
    from hvdlite.launch.dashboard.top import top

    top(options.process, options.once)


def _env(_: argparse.Namespace) -> None:
    from hvdlite.launch.check_build import describe_environment

    print(describe_environment(environment()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``hvdlite`` with these arguments, by default those of the process, and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["compat"]:  # its program needs a process of its own
        os.execv(sys.executable, [sys.executable, "-m", "hvdlite.compat", *given[1:]])
    if given[:1] == ["timeline"] and given[1:] and Path(given[1]).exists():
        given.insert(1, "summarize")
    parser = _parser()
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:end])
    options.words = given[end + 1 :]
    if options.words and options.action not in (run_advise, run_doctor):
        parser.error(f"{' '.join(options.words)}: only advise and doctor take the arguments of a program after --")
    try:
        if getattr(options, "num_proc", None) is not None:
            options.num_proc = count_ranks(Where.of(options), environment())
        return options.action(options) or 0
    except (HvdliteError, OSError) as error:
        print(f"hvdlite: {error}", file=sys.stderr)
        return USAGE_ERROR
