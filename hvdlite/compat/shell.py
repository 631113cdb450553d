"""This file finds what a shell script uses of Horovod: flags of horovodrun, and environment variables."""

from __future__ import annotations

import re
import shlex

from hvdlite.compat.settings_table import FLAGS
from hvdlite.compat.usage import Use

_VARIABLE = re.compile(r"\bHOROVOD_[A-Z0-9_]+\b")


def of_shell(text: str) -> list[Use]:
    """Return what a shell script uses of Horovod, in the order of its lines.

    A command that goes over several lines counts as written on its first line.

    Args:
        text: The text of the script.
    """
    uses = []
    for number, line in _commands(text):
        uses += [Use("variable", name, number) for name in _VARIABLE.findall(line)]
        words = iter(_words(line))
        for word in words:
            if word.rpartition("/")[2] == "horovodrun":
                uses += [Use("flag", flag, number) for flag in _flags(list(words))]
    return list(dict.fromkeys(uses))


def _commands(text: str) -> list[tuple[int, str]]:
    """Return the commands of a script with their line numbers. Comments are left out, and continued lines are joined."""
    commands: list[tuple[int, str]] = []
    goes_on = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        more = line.endswith("\\")
        part = line[:-1] if more else line
        if goes_on:
            commands[-1] = (commands[-1][0], f"{commands[-1][1]} {part}")
        else:
            commands.append((number, part))
        goes_on = more
    return commands


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # a quotation that goes on in the next line
        return line.split()


def _flags(words: list[str]) -> list[str]:
    """Return the flags of horovodrun in the words that follow it. The flags end where the program begins."""
    found = []
    while words and words[0].startswith("-"):
        flag, _, value = words.pop(0).partition("=")
        found.append(flag)
        if flag in FLAGS and not value:
            del words[: FLAGS[flag].values]
    return found
