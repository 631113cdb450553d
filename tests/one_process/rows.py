"""What rows of all frameworks have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R", bound="type[Row]")


class Inapplicable(Exception):
    """The way has no such option, so the program cannot even be written. The text says what is missing."""


class Row:
    """One thing that a program does.

    Attributes:
        name: The name of the row.
        words: A regular expression: what an error that refuses this row must say.
    """

    name = ""
    words = ""


def row_adder(rows: dict[str, Any]) -> Callable[[str, str], Callable[[R], R]]:
    """Return a decorator that enters a class under its name."""

    def named(name: str, words: str) -> Callable[[R], R]:
        def enter(cls: R) -> R:
            cls.name, cls.words = name, words
            rows[name] = cls
            return cls

        return enter

    return named
