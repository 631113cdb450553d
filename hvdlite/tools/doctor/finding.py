"""`Finding`: one thing that the doctor has found, with what was expected and what to do."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


class Severity(enum.IntEnum):
    """How much a finding matters. The larger, the worse."""

    NOTE = 0
    """Worth knowing; nothing is wrong."""
    WARNING = 1
    """Training runs, but more slowly, or it may fail later."""
    ERROR = 2
    """Training cannot run."""


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        severity: How much it matters.
        name: What it is about, such as "thread level". A name stands for one kind of fault.
        found: What was found, and where.
        expected: What was expected.
        do: What to do.
    """

    severity: Severity
    name: str
    found: str
    expected: str
    do: str

    def __str__(self) -> str:
        text = f"{self.name}: {self.found}; expected: {self.expected}; do: {self.do}"
        return f"{self.severity.name.lower():<8}{' '.join(text.split())}"

    def figures(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return {**asdict(self), "severity": self.severity.name.lower()}


def error(name: str, found: str, expected: str, do: str) -> Finding:
    """Return a finding that prevents training."""
    return Finding(Severity.ERROR, name, found, expected, do)


def warning(name: str, found: str, expected: str, do: str) -> Finding:
    """Return a finding that makes training slower, or lets it fail later."""
    return Finding(Severity.WARNING, name, found, expected, do)


def note(name: str, found: str, expected: str, do: str) -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(Severity.NOTE, name, found, expected, do)


def sort(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings without repetitions, the worst first, and within a severity in their order."""
    return sorted(dict.fromkeys(findings), key=lambda each: -each.severity)
