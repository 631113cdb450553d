"""``hvdlite`` merges and summarizes the timeline files of a job. (``hvdliterun`` starts jobs.)"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdlite.errors import HvdliteError

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
    return parser


def _merge(options: argparse.Namespace) -> None:
    from hvdlite.timeline.merge import merge_files

    about = merge_files(options.paths, options.output)["otherData"]["hvdlite"]
    print(f"{options.output}: {len(about['ranks'])} of {about['size']} ranks")


def _summarize(options: argparse.Namespace) -> None:
    from hvdlite.timeline.merge import load
    from hvdlite.timeline.summary import summarize

    print(summarize(load(options.paths), options.top), end="")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``hvdlite`` with these arguments, by default those of the process, and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        options.action(options)
    except (HvdliteError, OSError) as error:
        print(f"hvdlite: {error}", file=sys.stderr)
        return _FAILED
    return 0
