"""This file prints the report on programs (``--report``), and the table of everything that Horovod has (``--table``)."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdlite.compat import status
from hvdlite.compat.settings_table import FLAGS, VARIABLES
from hvdlite.compat.shell import of_shell
from hvdlite.compat.status import Kind, Status
from hvdlite.compat.table import MODULES, NOTES
from hvdlite.compat.usage import Use, of_python
from hvdlite.errors import ArgumentError

_KINDS: tuple[Kind, ...] = ("supported", "changed", "missing")
_WIDTH = 120
_SHELLS = ("sh", "bash", "zsh", "ksh", "dash")


@dataclass(frozen=True)
class ReportRow:
    """One row of a report: a name, an argument, a variable or a flag of Horovod that a file uses.

    Attributes:
        name: The full name.
        lines: The numbers of the lines that use it, ascending; the first line is 1.
        status: Whether hvdlite has it.
    """

    name: str
    lines: tuple[int, ...]
    status: Status


def main(paths: Sequence[str]) -> int:
    """Print the report on some programs.

    Args:
        paths: Python files, shell scripts, and folders of such files.

    Returns:
        The exit code: 0 if nothing is missing in hvdlite, 1 if something is missing, 2 if a path cannot be read.
    """
    try:
        reports = {path: rows_of(path) for path in _files(paths)}
    except ArgumentError as error:
        print(f"hvdlite compat: {error}", file=sys.stderr)
        return 2
    using = {path: rows for path, rows in reports.items() if rows}
    for path, rows in using.items():
        print(f"{path}\n{_table(rows)}\n")
    counts = Counter(row.status.kind for rows in using.values() for row in rows)
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in _KINDS)
    print(f"{len(using)} of {len(reports)} files use Horovod: {summary}.")
    return 1 if counts["missing"] else 0


def rows_of(path: Path) -> list[ReportRow]:
    """Return what a file uses of Horovod, in the order of its lines.

    A Python file that this version of Python cannot parse gets one row with the status "missing", if it mentions Horovod.

    Raises:
        ArgumentError: The file cannot be read, or is no text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read {path}: {error}") from error
    if _is_shell(path, text):
        return _rows(of_shell(text))
    try:
        return _rows(of_python(text))
    except (SyntaxError, ValueError) as error:
        if "horovod" not in text.lower():
            return []
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        unknown = Status("missing", f"this is no Python {version}, so nothing is known: {error}")
        return [ReportRow("(the file)", (getattr(error, "lineno", None) or 1,), unknown)]


def _rows(uses: Iterable[Use]) -> list[ReportRow]:
    lines: dict[str, list[int]] = {}
    states: dict[str, Status] = {}
    for use in uses:
        name, state = use.name, _status(use)
        if use.kind == "argument":
            if state.kind == "supported" or status.of_name(use.name).kind == "missing":
                continue  # only arguments that are missing get a row, and only if the function itself is not missing
            name = f"{use.name}({use.argument}=)"
        states[name] = state
        if use.line not in lines.setdefault(name, []):
            lines[name].append(use.line)
    return [ReportRow(name, tuple(where), states[name]) for name, where in lines.items()]


def _status(use: Use) -> Status:
    match use.kind:
        case "argument":
            missing = status.of_name(use.name).kind == "missing"
            return status.SUPPORTED if missing else status.of_argument(use.name, use.argument)
        case "variable":
            return status.of_variable(use.name)
        case "flag":
            return status.of_flag(use.name)
    return status.of_name(use.name)


def _files(paths: Iterable[str]) -> list[Path]:
    found = []
    for path in map(Path, paths):
        if path.is_dir():
            found += sorted(file for pattern in ("*.py", "*.sh") for file in path.rglob(pattern))
        elif path.exists():
            found.append(path)
        else:
            raise ArgumentError(f"there is no {path} in {Path.cwd()}.")
    return found


def _is_shell(path: Path, text: str) -> bool:
    first = text.partition("\n")[0]
    words = first[2:].replace("/", " ").split() if first.startswith("#!") else []
    return path.suffix == ".sh" or (path.suffix != ".py" and any(word in _SHELLS for word in words))


def _table(rows: Sequence[ReportRow]) -> str:
    names = [row.name for row in rows]
    places = [", ".join(map(str, row.lines[:4])) + (", …" if len(row.lines) > 4 else "") for row in rows]
    wide, far = max(map(len, (*names, "name"))), max(map(len, (*places, "line")))
    begin = f"  {{:{far}}}  {{:{wide}}}  {{:9}}  "
    result = [begin.format("line", "name", "status").rstrip()]
    for row, name, place in zip(rows, names, places, strict=True):
        left = begin.format(place, name, row.status.kind)
        notes = textwrap.wrap(row.status.note, max(40, _WIDTH - len(left))) or [""]
        result += [f"{left if number == 0 else ' ' * len(left)}{note}".rstrip() for number, note in enumerate(notes)]
    return "\n".join(result)


def markdown() -> str:
    """Return tables of everything that Horovod has, and of what hvdlite has of it, as Markdown for the page from_horovod."""
    names = [
        (module, {f"{module}.{name}": status.of_name(f"{module}.{name}") for name in entry.names})
        for module, entry in MODULES.items()
        if entry.names
    ]
    parts = [f"### `{module}`\n\n{_section(states, module)}" for module, states in names]
    elsewhere = {
        name: status.of_name(name) for name, note in NOTES.items() if note.status == "missing" and name not in MODULES
    }
    parts.append(f"### Other modules\n\n{_section(elsewhere, '')}")
    variables = {name: status.of_variable(name) for name in sorted({*VARIABLES, *_settings()})}
    parts.append(f"### Environment variables\n\n{_section(variables, '')}")
    flags = {name: status.of_flag(name) for name in FLAGS}
    parts.append(f"### Flags of horovodrun, for hvdliterun\n\n{_section(flags, '')}")
    return "\n\n".join(parts)


def _settings() -> list[str]:
    """Return the environment variables of Horovod that are settings of hvdlite too."""
    known = ("FUSION_THRESHOLD", "TIMELINE", "TIMELINE_MARK_CYCLES", "AUTOTUNE", "AUTOTUNE_LOG", "STALL_CHECK_DISABLE")
    return [f"HOROVOD_{name}" for name in (*known, "STALL_CHECK_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS")]


def _section(states: dict[str, Status], module: str) -> str:
    """Return a table with a row for each status and note: the names that share them."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, state in states.items():
        groups.setdefault((state.kind, state.note), []).append(name[len(module) + 1 :] if module else name)
    rows = ["| status | names | |", "|---|---|---|"]
    for kind in _KINDS:
        rows += [
            f"| {kind} | {', '.join(f'`{name}`' for name in members)} | {note} |"
            for (group, note), members in groups.items()
            if group == kind
        ]
    return "\n".join(rows)
