"""How our commands read arguments: wrong ones are refused in one line, with the option that was probably meant."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from hvdlite.checks import require
from hvdlite.errors import MissingPackageError

USAGE_ERROR = 2


class Parser(argparse.ArgumentParser):
    """argparse prints all options before an error, which moves the error off the screen where a command has fifty."""

    of_others: Mapping[str, str] = {}
    """What a user means by options that other programs have for the same."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and leave."""
        self.exit(USAGE_ERROR, f"{self.prog}: {message}{'' if message[-1] in '.?' else '.'} See {self.prog} --help\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Read the arguments. An option that does not exist is compared with those that do."""
        words = list(sys.argv[1:] if args is None else args)
        options, unknown = self.parse_known_args(words, namespace)
        if unknown:
            chosen = self._chosen_by(words)
            chosen.error(
                f"there is no {'option' if unknown[0].startswith('-') else 'argument'} {chosen._guess(unknown[0])}"
            )
        return options

    def _chosen_by(self, words: Sequence[str]) -> Parser:
        """Return the parser of the command that the words name: ``hvdlite timeline merge`` has one of its own."""
        parser = self
        for word in words:
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                    parser = action.choices[word]
        return parser

    def _guess(self, unknown: str) -> str:
        name = unknown.partition("=")[0]
        if known := self.of_others.get(name.replace("_", "-")):
            return f"{name}; did you mean {known}?"
        flags = [flag for action in self._actions if action.help != argparse.SUPPRESS for flag in action.option_strings]
        near = difflib.get_close_matches(name, flags, n=1, cutoff=0.7)
        return f"{name}; did you mean {near[0]}?" if near else name


def positive_int(text: str) -> int:
    """Read a whole number from 1 on."""
    if not re.fullmatch(r"0*[1-9][0-9]{0,11}", text):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 1 on")
    return int(text)


def whole(text: str) -> int:
    """Read a whole number from 0 on."""
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 0 on")
    return int(text)


def port(text: str) -> int:
    """Read the number of a port; 0 is any that is free."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a port, a number from 0 to 65535")
    return int(text)


def not_negative(text: str) -> float:
    """Read a number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def positive(text: str) -> float:
    """Read a number above 0."""
    value = not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


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
        help="print what makes a shell complete these options (hvdlite docs running)",
    )
