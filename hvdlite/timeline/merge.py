"""Merges the files of all ranks into one Chrome trace: one process per rank, one row per kind of event, one clock.

The trace is a JSON object in Google's Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappush, heapreplace
from pathlib import Path
from typing import Any, TextIO

from hvdlite.errors import ArgumentError
from hvdlite.timeline import rank_file
from hvdlite.timeline.rank_file import ClockLine, Event, RankFile, Row
from hvdlite.timeline.steps import Interval, divide

_LANES = 100_000
"""The most lanes of one `Row`. Events that overlap in time cannot share a lane."""
_LARGEST_BYTES = 2**26
"""The largest total size of files that are merged while all ranks wait. Such a merge takes about ten seconds."""
_BATCH = 1000
"""How many events are encoded in one call. json.dump needs no batches, but takes several times as long."""


def merge_files(paths: Iterable[Path], out: Path) -> dict[str, Any]:
    """Merge the files of ranks (or folders of files), and write the trace to `out`, whole or not at all.

    Returns:
        The trace, as `merge` returns it.

    Raises:
        ArgumentError: A path does not exist, or is not the file of a rank; or the files are not of one recording.
        OSError: The trace cannot be written.
    """
    trace = merge([rank_file.read(path) for path in rank_file.find(paths)])
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            _write(trace, file)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return trace


def _write(trace: Mapping[str, Any], file: TextIO) -> None:
    events = trace["traceEvents"]
    rest = {key: value for key, value in trace.items() if key != "traceEvents"}
    file.write(json.dumps(rest, separators=(",", ":"))[:-1] + ',"traceEvents":[\n')
    for start in range(0, len(events), _BATCH):
        text = json.dumps(events[start : start + _BATCH], separators=(",", ":"))
        file.write((",\n" if start else "") + text[1:-1])
    file.write("\n]}\n")


def conclude(trace: Path, size: int, job: str) -> str:
    """Merge the files of the ranks at the end of a recording and remove them, if all are there and not too large.

    Args:
        trace: The path of the merged trace.
        size: The number of ranks in the job.
        job: The identifier of the recording, as in `RankFile.job`.

    Returns:
        A text that tells the user what to do if the files were not merged; the empty string if they were.

    Raises:
        ArgumentError: See `merge_files`.
        OSError: See `merge_files`.
    """
    folder = rank_file.folder_of(trace)
    paths = [folder / rank_file.name_of_file(rank) for rank in range(size)]
    found = [rank_file.read_header(path) for path in paths]
    elsewhere = [str(rank) for rank, file in enumerate(found) if file is None or (file.job, file.rank) != (job, rank)]
    command = f"hvdlite timeline merge {folder} -o {trace}"
    if elsewhere:
        where = f"the files of ranks {', '.join(elsewhere)} are in {folder} of their own hosts"
        return f"{where}: bring all together in one folder, and: {command}"
    if sum(path.stat().st_size for path in paths) > _LARGEST_BYTES:
        return f"{folder} is too large to be merged while the job waits for it. Afterwards: {command}"
    merge_files(paths, trace)
    for path in paths:
        path.unlink()
    folder.rmdir()
    return ""


def load(paths: Sequence[Path]) -> dict[str, Any]:
    """Load a merged trace from its file, or make it from the files of the ranks.

    Raises:
        ArgumentError: A path does not exist, or is neither a merged trace nor the file of a rank; or the files are not of
            one recording.
    """
    if len(paths) == 1 and paths[0].is_file() and rank_file.read_header(paths[0]) is None:
        try:
            trace = json.loads(paths[0].read_text(encoding="utf-8"))
        except ValueError as error:
            raise ArgumentError(f"{paths[0]}: expected a trace in JSON: {error}.") from None
        if not isinstance(trace, dict) or "hvdlite" not in trace.get("otherData", {}):
            raise ArgumentError(f"{paths[0]}: expected a trace that hvdlite has merged; this is another one.")
        return trace
    return merge([rank_file.read(path) for path in rank_file.find(paths)])


def merge(files: Sequence[RankFile]) -> dict[str, Any]:
    """Make one trace from the files of ranks. The events of `files` are changed.

    Args:
        files: The files of some or all ranks of one recording.

    Returns:
        The trace as a JSON object. Its "traceEvents" have times in microseconds since the first event; its "otherData"
        holds under "hvdlite" which ranks there are, and how exact their clocks are.

    Raises:
        ArgumentError: There are no files; or they are not of one recording, or of one rank twice.
    """
    if not files:
        raise ArgumentError("expected the files of at least one rank; got none.")
    rank_file.check_together(files)
    files = sorted(files, key=lambda file: file.rank)
    for file in files:
        correct = correction(file.clocks)
        for event in file.events:
            begin = correct(event["ts"])
            if "dur" in event:
                event["dur"] = correct(event["ts"] + event["dur"]) - begin
            event["ts"] = begin
    start = min((event["ts"] for file in files for event in file.events), default=0.0)
    merged: list[Event] = []
    for file in files:
        for event in file.events:
            event["ts"] -= start
        merged += _rank_events(file)
    merged.sort(key=lambda event: (event["ts"], event["ph"] != "M"))
    about = {
        "size": files[0].size,
        "ranks": [file.rank for file in files],
        "job": files[0].job,
        "clock_error_us": {str(file.rank): max((clock.error for clock in file.clocks), default=None) for file in files},
        "clock_measurements": {str(file.rank): len(file.clocks) for file in files},
    }
    return {
        "traceEvents": merged,
        "displayTimeUnit": "ms",
        "otherData": {"hvdlite": about, "start_time_since_epoch_in_micros": int(min(f.epoch for f in files) * 1e6)},
    }


def correction(clocks: Sequence[ClockLine]) -> Callable[[float], float]:
    """Return the function that turns a rank's time into rank 0's, both in microseconds.

    The offset is interpolated linearly between two measurements, and is constant before the first and after the last.
    """
    times = [clock.at for clock in clocks]

    def correct(time: float) -> float:
        after = bisect_right(times, time)
        if not clocks:
            return time
        if after in (0, len(clocks)):
            return time + clocks[min(after, len(clocks) - 1)].offset
        left, right = clocks[after - 1], clocks[after]
        part = (time - left.at) / (right.at - left.at)
        return time + left.offset + part * (right.offset - left.offset)

    return correct


def _rank_events(file: RankFile) -> list[Event]:
    """Return the events of one rank and the names of its rows. No two events of a row overlap."""
    file.events += _unfinished(file.events)
    marks = [event for event in file.events if event["cat"] == "STEP"]
    events = [event for event in file.events if event["cat"] != "STEP"]
    events += _steps(file.rank, [mark["ts"] for mark in marks], events)
    by_row: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        begin = round(event["ts"], 3)  # to the nanosecond, so that adjacent events stay adjacent
        if "dur" in event:
            event["dur"] = round(round(event["ts"] + event["dur"], 3) - begin, 3)
        event["ts"] = begin
        by_row[event["tid"]].append(event)
    found = [
        rank_file.metadata("process_name", file.rank, 0, {"name": f"rank {file.rank} ({file.host})"}),
        rank_file.metadata("process_sort_index", file.rank, 0, {"sort_index": file.rank}),
    ]
    for row in sorted(by_row):
        lanes = _spread(by_row[row])
        for lane in range(lanes):
            number = row * _LANES + lane
            title = Row(row).name.lower() + (f" {lane + 1}" if lanes > 1 else "")
            found.append(rank_file.metadata("thread_name", file.rank, number, {"name": title}))
            found.append(rank_file.metadata("thread_sort_index", file.rank, number, {"sort_index": number}))
        found += by_row[row]
    return found


def _spread(events: list[Event]) -> int:
    """Give each event of a row a lane (as "tid") in which it overlaps no other. Return the number of lanes."""
    events.sort(key=lambda event: event["ts"])
    free: list[tuple[float, int]] = []  # a heap of lanes: the time at which each is free again, and its number
    for event in events:
        end = round(event["ts"] + event.get("dur", 0.0), 3)
        if free and free[0][0] <= event["ts"]:  # this lane has been free for longest
            lane = free[0][1]
            heapreplace(free, (end, lane))
        elif "dur" not in event and free:
            lane = 0  # a moment has no length, so it overlaps nothing
        else:
            lane = len(free)
            heappush(free, (end, lane))
        event["tid"] = event["tid"] * _LANES + min(lane, _LANES - 1)
    return min(len(free), _LANES)


def _unfinished(events: Sequence[Event]) -> list[Event]:
    """Return an event for each operation that was submitted and never done: it lasts until the rank's last event."""
    done = {
        event["args"]["operation"] for event in events if "operation" in event.get("args", {}) and event["ph"] == "X"
    }
    end = max((event["ts"] + event.get("dur", 0.0) for event in events), default=0.0)
    return [
        {
            **event,
            "ph": "X",
            "cat": "UNFINISHED",
            "tid": int(Row.NEGOTIATION),
            "dur": end - event["ts"],
        }
        for event in events
        if event["cat"] == "SUBMIT" and event["args"]["operation"] not in done
    ]


def _steps(rank: int, marks: Sequence[float], events: Sequence[Event]) -> list[Event]:
    """Return an event for each step, from one mark to the next. Without marks, the whole recording is one interval."""
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if "dur" in event]
    if not spans:
        return []
    first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
    bounds = [min(first, *marks), *marks] if marks else [first, last]
    names = ["before the end of step 1", *(f"step {number}" for number in range(2, len(marks) + 1))]
    steps = divide(bounds, _intervals(events, Row.PROGRAM), _intervals(events, Row.COPY, Row.EXCHANGE))
    found: list[Event] = []
    for name, step in zip(names if marks else ["everything"], steps, strict=True):
        length = max(step.end - step.begin, 1e-9)
        args = {
            "computing_ms": round(step.computing / 1000, 6),
            "waiting_ms": round(step.waiting / 1000, 6),
            "exchange_ms": round(step.exchange / 1000, 6),
            "computing": f"{step.computing / length:.1%}",
            "waiting": f"{step.waiting / length:.1%}",
            "exchange": f"{step.exchange / length:.1%}",
        }
        category = "STEP" if name.startswith("step") else "NO_STEP"
        event = {"name": name, "cat": category, "ph": "X", "ts": step.begin, "dur": step.end - step.begin}
        found.append({**event, "pid": rank, "tid": int(Row.STEP), "args": args})
    return found


def _intervals(events: Iterable[Event], *rows: Row) -> list[Interval]:
    return [(event["ts"], event["ts"] + event["dur"]) for event in events if event["tid"] in rows and "dur" in event]
