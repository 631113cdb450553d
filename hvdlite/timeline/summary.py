"""Who was late, by how much, and where the time of the steps went: what a merged trace says, as tables."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.timeline.rank_file import Event

_ENOUGH_UNFINISHED = 10


@dataclass(frozen=True)
class Meeting:
    """One operation or bucket for which the ranks were ready at different times.

    Attributes:
        name: The name of the operation or bucket.
        ready: When each rank was ready, microseconds.
        last: The rank that was ready last.
    """

    name: str
    ready: dict[int, float]

    @property
    def last(self) -> int:
        return max(self.ready, key=lambda rank: (self.ready[rank], -rank))

    @property
    def lateness(self) -> float:
        """Microseconds from the first rank to the last."""
        return max(self.ready.values()) - min(self.ready.values())

    @property
    def delay(self) -> float:
        """Microseconds by which the last rank alone made the others wait: from the last but one to the last."""
        times = sorted(self.ready.values())
        return times[-1] - times[-2]


def meetings(events: Iterable[Event]) -> list[Meeting]:
    """What at least two ranks were ready for, by the events of the negotiation."""
    ready: dict[tuple[tuple[Any, ...], int], dict[int, float]] = defaultdict(dict)
    again: Counter[tuple[Any, ...]] = Counter()  # a set that was removed and added counts its operations anew
    for event in events:
        args = event.get("args", {})
        if event.get("cat", "").startswith("NEGOTIATE") and event["ph"] == "X" and "number" in args:
            key = event["name"], args["number"], tuple(args.get("ranks", ()))
            again[key, event["pid"]] += 1
            ready[key, again[key, event["pid"]]][event["pid"]] = event["ts"]
    return [Meeting(key[0], times) for (key, _), times in ready.items() if len(times) > 1]


def summarize(trace: dict[str, Any], top: int = 20) -> str:
    """The summary of a merged trace.

    Args:
        trace: See `hvdlite.timeline.merge.merge`.
        top: How many operations and buckets to name.
    """
    events: list[Event] = trace["traceEvents"]
    met = meetings(events)
    parts = [_about(trace, met), _lateness_by_name(met, top), _lateness_by_rank(met), _shares(events), _pending(trace)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _about(trace: dict[str, Any], met: Sequence[Meeting]) -> str:
    about = trace["otherData"]["hvdlite"]
    events = trace["traceEvents"]
    seconds = max((event["ts"] + event.get("dur", 0.0) for event in events), default=0.0) / 1e6
    errors = about["clock_error_us"]
    unknown = [rank for rank, error in errors.items() if error is None]
    worst = max((error for error in errors.values() if error is not None), default=0.0)
    lines = [f"{len(about['ranks'])} of {about['size']} ranks, {seconds:.3f} s, {len(met)} operations and buckets."]
    lines.append(f"The clocks of the ranks are compared to within {_time(worst)}: smaller differences mean nothing.")
    if unknown:
        lines.append(f"Not compared: the clocks of ranks {', '.join(unknown)}.")
    missing = sorted(set(range(about["size"])) - set(about["ranks"]))
    if missing:
        lines.append(f"There are no files of ranks {', '.join(map(str, missing))}.")
    return "\n".join(lines)


def _lateness_by_name(met: Sequence[Meeting], top: int) -> str:
    if not met:
        return "No operation has begun on two ranks or more: nobody was late."
    by_name: dict[str, list[Meeting]] = defaultdict(list)
    for meeting in met:
        by_name[_family(meeting.name)].append(meeting)
    ordered = sorted(by_name.items(), key=lambda item: -sum(meeting.lateness for meeting in item[1]))
    rows = []
    for name, group in ordered[:top]:
        spread = [meeting.lateness for meeting in group]
        rank, times = Counter(meeting.last for meeting in group).most_common(1)[0]
        often = f"rank {rank} ({times} of {len(group)})"
        rows.append([name, str(len(group)), _time(statistics.fmean(spread)), _time(max(spread)), often])
    title = "Who was late: the time from the first rank that was ready to the last"
    more = f"\n… and {len(ordered) - top} more (--top)" if len(ordered) > top else ""
    return f"{title}\n{_table(['operation or bucket', 'times', 'mean', 'longest', 'most often last'], rows)}{more}"


def _lateness_by_rank(met: Sequence[Meeting]) -> str:
    rows = []
    for rank in sorted({rank for meeting in met for rank in meeting.ready}):
        present = [meeting for meeting in met if rank in meeting.ready]
        last = [meeting for meeting in present if meeting.last == rank]
        behind = [meeting.ready[rank] - min(meeting.ready.values()) for meeting in present]
        delay = sum(meeting.delay for meeting in last)
        rows.append(
            [
                str(rank),
                f"{len(last)} of {len(present)}",
                _time(statistics.fmean(behind)),
                _time(max(behind)),
                _time(delay),
            ]
        )
    if not rows:
        return ""
    heads = ["rank", "was last", "behind the first, mean", "longest", "alone kept the others waiting, in all"]
    return f"By rank\n{_table(heads, rows)}"


def _shares(events: Sequence[Event]) -> str:
    steps: dict[int, list[Event]] = defaultdict(list)
    whole: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "STEP":
            steps[event["pid"]].append(event)
        elif event.get("cat") == "NO_STEP":
            whole[event["pid"]].append(event)
    chosen = steps or whole
    rows = []
    for rank, group in sorted(chosen.items()):
        length = statistics.fmean(event["dur"] for event in group)
        row = [str(rank), str(len(group)), _time(length)]
        for share in ("computing", "waiting", "exchange"):
            mean = statistics.fmean(event["args"][f"{share}_ms"] for event in group) * 1000
            row.append(f"{_time(mean)} ({mean / max(length, 1e-9):.0%})")
        rows.append(row)
    if not rows:
        return ""
    title = "Where the time of a step goes, on average" if steps else "Where the time goes (no steps are marked)"
    return f"{title}\n{_table(['rank', 'steps', 'length', 'computing', 'waiting for others', 'exchange'], rows)}"


def _pending(trace: dict[str, Any]) -> str:
    """What was never done: after a job that was killed, who waited for whom."""
    names: dict[str, list[int]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("cat") == "UNFINISHED":
            names[event["name"]].append(event["pid"])
    if not names:
        return ""
    everybody = trace["otherData"]["hvdlite"]["ranks"]
    lines = []
    for name, ranks in list(names.items())[:_ENOUGH_UNFINISHED]:
        others = [rank for rank in everybody if rank not in ranks]
        text = f"  {name}: submitted by ranks {', '.join(map(str, sorted(set(ranks))))}"
        lines.append(text + (f"; not by {', '.join(map(str, others))}, or done there" if others else ""))
    if len(names) > _ENOUGH_UNFINISHED:
        lines.append(f"  … and {len(names) - _ENOUGH_UNFINISHED} more")
    return "Never finished\n" + "\n".join(lines)


def _family(name: str) -> str:
    """Unnamed operations have numbers, which are of no use in a table."""
    start, noname, number = name.rpartition(".noname.")
    return f"{start} (unnamed)" if noname and number.isdecimal() else name


def _time(microseconds: float) -> str:
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.2f} s"
    return f"{microseconds / 1e3:.2f} ms" if microseconds >= 1e3 else f"{microseconds:.0f} µs"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as need be; the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
