"""The format of a rank's file, and its reader.

The file is a Chrome trace: an open JSON array with one event per line, so that it can be read even if the rank was killed::

    [
    {"name": "hvdlite_rank", "ph": "M", "pid": 1, …, "args": {"job": "9f0c…", "rank": 1, "size": 3, …}},
    {"name": "hvdlite_clock", "ph": "M", …, "args": {"at_us": …, "offset_us": …, "error_us": …}},
    {"name": "allreduce.loss", "cat": "NEGOTIATE_ALLREDUCE", "ph": "X", "ts": …, "dur": …, "pid": 1, "tid": 2, "args": {…}},

Times are microseconds on the rank's own clock; the lines named "hvdlite_clock" say what to add to them. The closing bracket
is never written: the format (Trace Event Format, Google, "JSON Array Format") does not require it. The last line may be
incomplete.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdlite.errors import ArgumentError


class Row(enum.IntEnum):
    """A row of the picture of one rank: events of one kind."""

    STEP = 1
    """A step: from the end of one gradient exchange to the end of the next, with the parts of its time."""
    PROGRAM = 2
    """The program waits for an operation or a gradient exchange. Between these events the program computes."""
    NEGOTIATION = 3
    """Negotiation: from the moment at which this rank is ready for something until all ranks are."""
    QUEUE = 4
    """The queue: from the moment at which an operation may run until it runs."""
    COPY = 5
    """Copies between tensors and the buffers of an exchange."""
    EXCHANGE = 6
    """A collective runs: the ranks exchange data."""


RANK_LINE = "hvdlite_rank"
CLOCK_LINE = "hvdlite_clock"

Event = dict[str, Any]
"""One event of the Trace Event Format, as a JSON object."""


def folder_of(trace: Path) -> Path:
    """Return the folder that holds the ranks' files of a trace."""
    return trace.with_name(trace.name + ".ranks")


def name_of_file(rank: int) -> str:
    """Return the name of a rank's file in its folder."""
    return f"rank.{rank}.json"


def metadata(name: str, rank: int, row: int, args: dict[str, Any]) -> Event:
    """Return a metadata event: it describes a rank or a row instead of something that happened."""
    return {"name": name, "ph": "M", "pid": rank, "tid": row, "ts": 0, "args": args}


def line(event: Event) -> str:
    """Return an event as a line of a rank's file."""
    return json.dumps(event, separators=(",", ":")) + ",\n"


@dataclass(frozen=True)
class ClockLine:
    """A measurement of a rank's clock, in microseconds: at time `at` its offset to rank 0's was `offset` ± `error`."""

    at: float
    offset: float
    error: float


@dataclass
class RankFile:
    """The contents of a rank's file.

    Attributes:
        path: The path of the file.
        rank: The rank that wrote the file.
        size: The number of ranks in the job.
        job: The identifier of the recording. All files of one recording have it, and no others.
        host: The name of the rank's host.
        epoch: The start of the recording in seconds since 1970, on the host's wall clock.
        clocks: The measurements of the rank's clock, in the order of time.
        events: The events without metadata, in the order in which they were written.
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
    """Return the ranks' files that `paths` name: files, and folders with such files.

    Raises:
        ArgumentError: A path does not exist, or a folder holds no file of a rank.
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
    """Read the first lines of a rank's file, without its events. Return None if this is not the file of a rank."""
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
    """Read a rank's file. Its last line may be incomplete.

    Raises:
        ArgumentError: The file is not that of a rank, or another line than the last is not an event.
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
    """Return the event on a line, or None if there is none, as on the incomplete last line of a killed rank."""
    try:
        event = json.loads(text.rstrip().removesuffix(","))
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def check_together(files: Sequence[RankFile]) -> None:
    """Check that files are of one recording.

    Raises:
        ArgumentError: The files are of several recordings, or two of them are of the same rank.
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
