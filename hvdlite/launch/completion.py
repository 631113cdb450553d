"""``--print-completion SHELL``: what makes a shell complete the options of a command. The package shtab writes it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from hvdlite.checks import require
from hvdlite.errors import MissingPackageError

SHELLS = ("bash", "zsh", "tcsh")


class _Print(argparse.Action):
    """The argparse action that prints the completion of its parser, and leaves."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            require("shtab", "completion", str(option_string))
        except MissingPackageError as error:
            parser.error(str(error))
        import shtab

        try:
            print(shtab.complete(parser, str(values)), flush=True)
        except BrokenPipeError:  # the reader has what it wants, as head does; Python writes the rest when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        parser.exit()


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add the option to a parser."""
    parser.add_argument(
        "--print-completion",
        action=_Print,
        choices=SHELLS,
        help="print what makes a shell complete these options (docs/running.md)",
    )
