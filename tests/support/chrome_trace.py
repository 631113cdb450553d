"""Checks that a Chrome trace follows the Trace Event Format, so that Perfetto opens the trace."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def check_chrome_trace(trace: Any) -> list[dict[str, Any]]:
    """Fail if `trace`, as read from JSON, is not a valid trace. Return its events without the metadata."""
    assert isinstance(trace, dict)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    assert isinstance(events, list)
    assert events
    processes, rows = set(), set()
    ends: dict[tuple[int, int], float] = defaultdict(float)
    begins: dict[tuple[int, int], float] = defaultdict(float)
    plain = []
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert type(event["ts"]) in (int, float)
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            assert event["name"] in METADATA
            if event["name"] == "process_name":
                processes.add(event["pid"])
                assert isinstance(event["args"]["name"], str)
            elif event["name"] == "thread_name":
                rows.add((event["pid"], event["tid"]))
                assert isinstance(event["args"]["name"], str)
            else:
                assert type(event["args"]["sort_index"]) is int
            continue
        plain.append(event)
        row = event["pid"], event["tid"]
        assert event["pid"] in processes, "metadata comes first, so that every row has its name"
        assert row in rows
        assert isinstance(event["cat"], str)
        assert event["ts"] >= begins[row], "the events of a row come in the order of time"
        begins[row] = event["ts"]
        if event["ph"] == "X":
            assert math.isfinite(event["dur"])
            assert event["dur"] >= 0
            assert event["ts"] >= ends[row] - 1e-6, "the events of a row do not overlap"
            ends[row] = event["ts"] + event["dur"]
        else:
            assert event["ph"] == "i", "only complete events and instants are used"
            assert event["s"] in ("t", "p", "g")
    return plain
