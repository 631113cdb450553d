"""How our commands refuse wrong arguments: in one line, with the option that was probably meant."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

USAGE_ERROR = 2


class Parser(argparse.ArgumentParser):
    """argparse prints all options before an error, which moves the error off the screen where a command has fifty."""

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
        flags = [flag for action in self._actions if action.help != argparse.SUPPRESS for flag in action.option_strings]
        near = difflib.get_close_matches(name, flags, n=1, cutoff=0.7)
        return f"{name}; did you mean {near[0]}?" if near else name
