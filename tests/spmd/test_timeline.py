"""A timeline of real operations, on ranks as threads and as processes."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.errors import ArgumentError
from tests.support.chrome_trace import check_chrome_trace
from tests.support.jobs import wait_for

Ranks = Callable[..., list[Any]]


def _shared(path: Path) -> Path:
    """Rank 0's path: as processes the ranks have temporary folders of their own."""
    return Path(hvd.broadcast_object(str(path)))


def _load(path: Path) -> Any:
    """On rank 0 the trace as soon as stop_timeline has returned; None elsewhere."""
    return json.loads(path.read_text()) if hvd.rank() == 0 else None


def test_every_operation_is_in_the_trace_once_for_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    def work() -> Any:
        path = _shared(tmp_path / "new" / "trace.json")
        hvd.allreduce(np.ones(3), name="before")
        hvd.start_timeline(path, mark_cycles=True)
        for _ in range(3):
            hvd.allreduce(np.ones(5, np.float32), name="loss")
            handles = [hvd.allreduce_async(np.ones(n + 1), name=f"grad {n}") for n in range(4)]
            for handle in handles:
                handle.wait()
        hvd.allgather(np.ones((hvd.rank(), 2)), name='quoted "ü" name')
        hvd.broadcast(np.ones(3), 0)
        hvd.barrier()
        hvd.stop_timeline()
        hvd.allreduce(np.ones(3), name="after")
        assert not (path.parent / "trace.json.ranks").exists()
        return _load(path), hvd.size()

    trace, size = ranks(work)[0]
    events = check_chrome_trace(trace)
    assert trace["otherData"]["hvdlite"]["ranks"] == list(range(size))
    expected = {"allreduce.loss": 3, 'allgather.quoted "ü" name': 1, **{f"allreduce.grad {n}": 3 for n in range(4)}}
    for rank in range(size):
        for category in ("SUBMIT", "NEGOTIATE", "QUEUE"):
            found = Counter(e["name"] for e in events if e["pid"] == rank and e["cat"].startswith(category))
            assert {name: found[name] for name in expected} == expected
            assert found["allreduce.before"] == found["allreduce.after"] == 0
            unnamed = [name for name in found if ".noname." in name and not name.startswith("stop")]
            assert sorted(name.split(".")[0] for name in unnamed) == ["barrier", "broadcast"]
        own = [event for event in events if event["pid"] == rank]
        loss = [event for event in own if event["name"] == "allreduce.loss"]
        for number in {event["args"]["number"] for event in loss if event["cat"] == "NEGOTIATE_ALLREDUCE"}:
            parts = {event["cat"]: event for event in loss if event.get("args", {}).get("number") == number}
            order = ["NEGOTIATE_ALLREDUCE", "QUEUE", "MEMCPY_IN", "ALLREDUCE", "MEMCPY_OUT"]
            assert sorted(parts) == sorted(order)
            for first, second in pairwise(order):
                assert parts[first]["ts"] + parts[first]["dur"] == pytest.approx(parts[second]["ts"], abs=0.01)
            assert parts["ALLREDUCE"]["args"]["bytes"] == 20
        assert any(event["name"] == "CYCLE_START" for event in own)
        assert sum(event["cat"] == "WAIT" and event["name"] == "allreduce.loss" for event in own) == 3
        (share,) = (event for event in own if event["cat"] == "NO_STEP")
        total = sum(share["args"][f"{part}_ms"] for part in ("computing", "waiting", "exchange"))
        assert total == pytest.approx(share["dur"] / 1000, abs=1e-4)
    assert not [event for event in events if event["cat"] in ("UNFINISHED", "FAILED")]


def test_what_ran_together_has_the_same_number_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    def work() -> Any:
        path = _shared(tmp_path / "trace.json")
        hvd.start_timeline(path)
        names = [f"t{n}" for n in range(5)]
        for turn in range(4):
            order = names[(turn + hvd.rank()) % 5 :] + names[: (turn + hvd.rank()) % 5]  # another one on each rank
            for handle in [hvd.allreduce_async(np.ones(2), name=name) for name in order]:
                handle.wait()
        hvd.stop_timeline()
        return _load(path), hvd.size()

    trace, size = ranks(work)[0]
    numbers: dict[int, list[Any]] = {rank: [] for rank in range(size)}
    for event in check_chrome_trace(trace):
        if event["cat"] == "NEGOTIATE_ALLREDUCE":
            numbers[event["pid"]].append((event["name"], event["args"]["number"]))
    assert all(sorted(found) == sorted(numbers[0]) for found in numbers.values())
    assert len(set(numbers[0])) == len(numbers[0]) == 20


def test_the_trace_can_be_read_while_the_job_runs(ranks: Ranks, tmp_path: Path) -> None:
    """As Horovod's: at its path, on rank 0's host, with what rank 0 does."""

    def work() -> None:
        path = _shared(tmp_path / "trace.json")
        if hvd.rank() == 0:
            path.write_text("of an earlier job")
        hvd.start_timeline(path, mark_cycles=True)
        hvd.allreduce(np.ones(3), name="seen")
        if hvd.rank() == 0:
            wanted = ("allreduce.seen", "NEGOTIATE_ALLREDUCE", '"ALLREDUCE"', "CYCLE_START")
            wait_for(lambda: all(word in path.read_text() for word in wanted), 20)
            assert path.read_text().startswith("[\n{")
        hvd.barrier()
        hvd.stop_timeline()
        assert json.loads(path.read_text())["otherData"]["hvdlite"]
        assert not path.is_symlink() and list(path.parent.iterdir()) == [path]
        hvd.barrier()

    ranks(work)


def test_start_and_stop_again(ranks: Ranks, tmp_path: Path) -> None:
    def work() -> Any:
        hvd.stop_timeline()  # nothing to stop
        traces = []
        for turn in range(3):
            path = _shared(tmp_path / f"trace {turn}.json")
            # Only rank 0's path counts, as with Horovod, where only rank 0 writes.
            hvd.start_timeline(str(path) if hvd.rank() == 0 else "/nowhere/at/all")
            with pytest.raises(ArgumentError, match="already"):
                hvd.start_timeline(path)
            hvd.allreduce(np.ones(3), name=f"turn {turn}")
            hvd.stop_timeline()
            traces.append(_load(path))
        return traces

    for turn, trace in enumerate(ranks(work)[0]):
        names = {event["name"] for event in check_chrome_trace(trace)}
        assert [f"allreduce.turn {n}" in names for n in range(3)] == [n == turn for n in range(3)]


def test_a_path_that_cannot_be_written_is_an_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def work() -> None:
        for path in (tmp_path / "file" / "trace.json", tmp_path):
            with pytest.raises(ArgumentError, match="cannot write a timeline: rank 0: .*(Not a directory|is a folder)"):
                hvd.start_timeline(_shared(path))
        assert hvd.allreduce(np.ones(1), hvd.Sum) == hvd.size()

    ranks(work)


def test_a_start_that_not_all_ranks_call_is_an_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    def work() -> None:
        for name in (None, "named"):
            begin = (lambda: hvd.start_timeline(tmp_path / "trace.json")) if hvd.rank() == 0 else None
            call = begin or functools.partial(hvd.allreduce, np.ones(3), name=name)
            if hvd.size() > 1:
                with pytest.raises(hvd.MismatchError, match="start_timeline"):
                    call()
        assert hvd.allreduce(np.ones(1), hvd.Sum) == hvd.size()

    ranks(work)


def test_a_refused_operation_is_noted(ranks: Ranks, tmp_path: Path) -> None:
    def work() -> Any:
        path = _shared(tmp_path / "trace.json")
        hvd.start_timeline(path)
        if hvd.size() > 1:
            with pytest.raises(hvd.MismatchError):
                hvd.allreduce(np.ones(1 + hvd.rank()), name="ragged")
        hvd.stop_timeline()
        return _load(path), hvd.size()

    trace, size = ranks(work)[0]
    errors = [event["args"]["error"] for event in check_chrome_trace(trace) if "error" in event.get("args", {})]
    assert len(errors) == (size if size > 1 else 0)
    assert all("the ranks do not agree on 'ragged'" in error for error in errors)


def test_operations_of_a_process_set_name_its_ranks(ranks: Ranks, tmp_path: Path) -> None:
    def work() -> Any:
        path = _shared(tmp_path / "trace.json")
        last = [hvd.size() - 1]
        part = hvd.add_process_set(last) if hvd.size() > 1 else None
        hvd.start_timeline(path)
        if hvd.size() > 1 and hvd.rank() in last:
            hvd.allreduce(np.ones(2), name="alone", process_set=part)
        hvd.stop_timeline()
        if part is not None:
            hvd.remove_process_set(part)
        return _load(path), hvd.size()

    trace, size = ranks(work)[0]
    found = [event for event in check_chrome_trace(trace) if event["cat"] == "NEGOTIATE_ALLREDUCE"]
    assert [(event["pid"], event["args"]["ranks"]) for event in found] == ([(size - 1, [size - 1])] if size > 1 else [])
