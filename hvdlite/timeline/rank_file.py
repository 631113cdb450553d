"""The file of one rank: a Chrome trace as an open JSON array, one event a line, so that a killed rank leaves it readable.

    [
    {"name": "hvdlite_rank", "ph": "M", "pid": 1, …, "args": {"job": "9f0c…", "rank": 1, "size": 3, …}},
    {"name": "hvdlite_clock", "ph": "M", …, "args": {"at_us": …, "offset_us": …, "error_us": …}},
    {"name": "allreduce.loss", "cat": "NEGOTIATE_ALLREDUCE", "ph": "X", "ts": …, "dur": …, "pid": 1, "tid": 2, "args": {…}},

Times are microseconds on the rank's own clock; the lines named "hvdlite_clock" say what to add to them. The closing bracket
is never written: the format (Trace Event Format, Google, "JSON Array Format") does without it. The last line may be torn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdlite.errors import ArgumentError

RANK_LINE = "hvdlite_rank"
CLOCK_LINE = "hvdlite_clock"

Event = dict[str, Any]
"""One event as the Trace Event Format has it."""


def folder_of(trace: Path) -> Path:
    """Where the ranks' files of a trace are."""
    return trace.with_name(trace.name + ".ranks")


def name_of_file(rank: int) -> str:
    """The name of a rank's file in the folder."""
    return f"rank.{rank}.json"


def metadata(name: str, rank: int, row: int, args: dict[str, Any]) -> Event:
    """A metadata event."""
    return {"name": name, "ph": "M", "pid": rank, "tid": row, "ts": 0, "args": args}


def line(event: Event) -> str:
    """An event as a line of a rank's file."""
    return json.dumps(event, separators=(",", ":")) + ",\n"


@dataclass(frozen=True)
class ClockLine:
    """A measurement of a rank's clock, in microseconds: at `at`, `offset` was to be added, give or take `error`."""

    at: float
    offset: float
    error: float


@dataclass
class RankFile:
    """What a rank has written.

    Attributes:
        path: The file.
        rank: Whose it is.
        size: The number of ranks in the job.
        job: A number that all files of one recording share, and no others.
        host: The name of the rank's host.
        epoch: Seconds since 1970 at the start, on that host's clock of the day.
        clocks: Measurements, in order.
        events: Everything that is no metadata, in the order in which it was written.
    """

    path: Path
    rank: int
    size: int
    job: str
    host: str
    epoch: float
    clocks: list[ClockLine] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


def find(paths: Iterable[Path]) -> list[Path]:
    """The ranks' files that `paths` (files, and folders with such files) name.

    Raises:
        ArgumentError: A path does not exist, or a folder has none.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob("rank.*.json"), key=lambda file: (len(file.name), file.name))
            if not inside:
                raise ArgumentError(f"{path}: expected files rank.0.json, rank.1.json, …; there are none.")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise ArgumentError(f"{path}: there is no such file or folder.")
    return found


def read_header(path: Path) -> RankFile | None:
    """What the first lines of a rank's file say, without its events; None if this is no rank's file."""
    try:
        with path.open(encoding="utf-8") as file:
            file.readline()
            event = _parse(file.readline())
    except (OSError, UnicodeDecodeError):
        return None
    if event is None or event.get("name") != RANK_LINE:
        return None
    args = event["args"]
    return RankFile(path, args["rank"], args["size"], args["job"], args["host"], args["epoch"])


def read(path: Path) -> RankFile:
    """Read a rank's file, whole or torn.

    Raises:
        ArgumentError: It is not the file of a rank, or has a line in the middle that is no event.
    """
    found = read_header(path)
    if found is None:
        raise ArgumentError(
            f"{path}: expected what a rank writes with HVDLITE_TIMELINE or start_timeline(); it does not begin like that."
        )
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file):
            event = _parse(text) if number else None
            if event is None:
                if number and text.endswith("\n"):
                    raise ArgumentError(f"{path}, line {number + 1}: expected an event; found {text[:60]!r}.")
            elif event["ph"] != "M":
                found.events.append(event)
            elif event["name"] == CLOCK_LINE:
                args = event["args"]
                found.clocks.append(ClockLine(args["at_us"], args["offset_us"], args["error_us"]))
    return found


def _parse(text: str) -> Event | None:
    """The event on a line, or None if it has none, as the last line of a killed rank."""
    try:
        event = json.loads(text.rstrip().removesuffix(","))
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def check_together(files: Sequence[RankFile]) -> None:
    """Check that files are of one recording.

    Raises:
        ArgumentError: They are not, or a rank is there twice.
    """
    jobs = {file.job: file for file in files}
    if len(jobs) > 1:
        one, other = list(jobs.values())[:2]
        raise ArgumentError(
            f"{one.path} and {other.path} are of different recordings: name the files of one, or remove those of the other."
        )
    ranks: dict[int, RankFile] = {}
    for file in files:
        if file.rank in ranks:
            raise ArgumentError(
                f"{ranks[file.rank].path} and {file.path} are both of rank {file.rank}: name one of them."
            )
        ranks[file.rank] = file
