"""Timelines: clocks, files of ranks that were killed, the merged trace, and what is said about it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.config import Config
from hvdlite.errors import ArgumentError
from hvdlite.testing import on_ranks
from hvdlite.timeline import BucketRecord, Row, rank_file
from hvdlite.timeline.merge import load, merge, merge_files
from hvdlite.timeline.rank_file import ClockLine, RankFile
from hvdlite.timeline.steps import divide
from hvdlite.timeline.summary import summarize
from hvdlite.tools.cli import main
from tests.support.chrome_trace import check_chrome_trace
from tests.support.jobs import PROGRAMS, Start

PROGRAM = str(PROGRAMS / "timeline.py")


# Clocks


def test_clocks_that_differ_and_drift_are_aligned_within_the_error_that_is_reported(tmp_path: Path) -> None:
    hours = 3_600_000_000_000
    true = time.perf_counter_ns
    began = true()
    rates, starts = (0.0, 0.2, -0.2), (0, 7 * hours, -5 * hours)  # rank 0's is the true one
    truth: dict[tuple[int, int], tuple[int, int]] = {}

    def work() -> None:
        rank, timeline = hvd.rank(), world().timeline
        timeline.clock = lambda: int((true() - began) * (1 + rates[rank])) + began + starts[rank]
        hvd.start_timeline(tmp_path / "trace.json")
        for number in range(20):
            before = true()
            timeline.mark(Row.PROGRAM, "PROBE", f"probe {number}")
            truth[rank, number] = before, true()
            hvd.barrier()
        hvd.stop_timeline()

    on_ranks(3, work)
    trace = json.loads((tmp_path / "trace.json").read_text())
    probes = {(e["pid"], int(e["name"].split()[1])): e["ts"] for e in check_chrome_trace(trace) if e["cat"] == "PROBE"}
    assert sorted(probes) == sorted(truth)
    errors = trace["otherData"]["hvdlite"]["clock_error_us"]
    assert errors["0"] == 0
    start = min(truth.values())[0]  # as all are compared with rank 0's, only differences can be known
    zero = [probes[0, n] - (truth[0, n][0] - start) / 1000 for n in range(20)]
    slack = [(after - before) / 1000 for before, after in (truth[0, n] for n in range(20))]
    first = min(range(20), key=slack.__getitem__)
    for (rank, number), (before, after) in truth.items():
        allowed = errors[str(rank)] * 1.5 + slack[first] + 1.0
        assert (
            (before - start) / 1000 - allowed <= probes[rank, number] - zero[first] <= (after - start) / 1000 + allowed
        )
    assert max(errors.values()) < 1e6, "a bound of a second would make the comparison worthless"


def test_an_offset_changes_evenly_between_two_measurements() -> None:
    clocks = [ClockLine(100.0, 50.0, 1.0), ClockLine(200.0, 60.0, 2.0)]
    file = RankFile(Path("rank.0.json"), 0, 1, "job", "host", 0.0, clocks)
    times = (0.0, 100.0, 130.0, 200.0, 300.0)
    file.events = [{"name": f"at {t}", "cat": "PROBE", "ph": "i", "s": "t", "ts": t, "pid": 0, "tid": 2} for t in times]
    file.events[2] |= {"ph": "X", "dur": 20.0}
    events = {event["name"]: event for event in check_chrome_trace(merge([file]))}
    assert [events[f"at {t}"]["ts"] for t in times] == [0.0, 100.0, 133.0, 210.0, 310.0]
    assert events["at 130.0"]["dur"] == 22.0


# Files


def _write_file(folder: Path, rank: int, events: list[dict[str, Any]], size: int = 3, job: str = "job") -> Path:
    about = {"job": job, "rank": rank, "size": size, "host": "here", "epoch": 1000.0}
    lines = [rank_file.metadata(rank_file.RANK_LINE, rank, 0, about)]
    lines += [rank_file.metadata(rank_file.CLOCK_LINE, rank, 0, {"at_us": 0, "offset_us": 0, "error_us": 1.5})]
    lines += [{"pid": rank, **event} for event in events]
    folder.mkdir(exist_ok=True)
    path = folder / rank_file.name_of_file(rank)
    path.write_text("[\n" + "".join(map(rank_file.line, lines)))
    return path


def _span(row: Row, category: str, name: str, begin: float, duration: float, **args: Any) -> dict[str, Any]:
    return {"name": name, "cat": category, "ph": "X", "ts": begin, "dur": duration, "tid": int(row), "args": args}


def test_a_file_that_ends_anywhere_gives_what_is_whole_in_it(tmp_path: Path) -> None:
    events = [_span(Row.QUEUE, "QUEUE", f'"{n}" é', n, 0.5, number=n) for n in range(6)]
    path = _write_file(tmp_path, 0, events)
    whole = path.read_bytes()
    lines = whole.split(b"\n")
    head = sum(len(line) + 1 for line in lines[:3])
    for end in range(head, len(whole) + 1):
        path.write_bytes(whole[:end])
        found = rank_file.read(path).events
        assert [event["name"] for event in found] == [event["name"] for event in events[: len(found)]]
        complete = whole[:end].count(b"\n") - 3
        assert complete <= len(found) <= complete + 1


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    event = [_span(Row.QUEUE, "QUEUE", "a", 0, 1)]
    one, two = _write_file(tmp_path / "a", 0, event), _write_file(tmp_path / "b", 1, event, job="another")
    with pytest.raises(ArgumentError, match="of different recordings"):
        merge_files([one, two], tmp_path / "out.json")
    twin = _write_file(tmp_path / "c", 0, event)
    with pytest.raises(ArgumentError, match="both of rank 0"):
        merge_files([one, twin], tmp_path / "out.json")
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    with pytest.raises(ArgumentError, match="does not begin like that"):
        merge_files([tmp_path / "other.json"], tmp_path / "out.json")
    with pytest.raises(ArgumentError, match="this is another one"):
        load([tmp_path / "other.json"])
    with pytest.raises(ArgumentError, match="no such file"):
        load([tmp_path / "missing.json"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match="there are none"):
        load([tmp_path / "empty"])
    with one.open("a") as file:
        file.write("nonsense\n")
        file.write(rank_file.line(event[0] | {"pid": 0}))
    with pytest.raises(ArgumentError, match="line 5: expected an event; found 'nonsense"):
        load([one])
    assert not (tmp_path / "out.json").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_events_that_overlap_get_rows_of_their_own(tmp_path: Path) -> None:
    generator = random.Random(3)
    spans = [(generator.randrange(2000), generator.randrange(1, 40)) for _ in range(2500)]
    path = _write_file(tmp_path, 0, [_span(Row.NEGOTIATION, "N", f"{n}", *span) for n, span in enumerate(spans)])
    trace = merge_files([path], tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace
    events = [event for event in check_chrome_trace(trace) if event["cat"] == "N"]
    first = min(begin for begin, _ in spans)
    assert sorted((event["ts"] + first, event["dur"]) for event in events) == sorted(spans)
    at_once = max(sum(begin <= moment < begin + length for begin, length in spans) for moment in range(2040))
    assert len({event["tid"] for event in events}) == at_once, "no more rows than there are events at the same time"


def test_files_of_an_earlier_job_with_more_ranks_do_not_get_in(tmp_path: Path) -> None:
    left = _write_file(tmp_path / "trace.json.ranks", 5, [], size=6)

    def work() -> None:
        hvd.barrier()

    on_ranks(2, work, config=Config(timeline=str(tmp_path / "trace.json")))
    assert not left.exists()
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_chrome_trace(trace)
    assert trace["otherData"]["hvdlite"]["ranks"] == [0, 1]


def test_dynamic_means_not_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    on_ranks(2, hvd.barrier, config=Config.from_env({"HOROVOD_TIMELINE": "DYNAMIC"}))
    assert not list(tmp_path.iterdir())


# Steps and summaries


def test_the_shares_of_steps_agree_with_counting_microseconds() -> None:
    generator = np.random.default_rng(4)
    length = 400
    for _ in range(50):
        waits, moves = (
            [(int(begin), int(begin + span)) for begin, span in generator.integers(0, (380, 20), (count, 2))]
            for count in (12, 15)
        )
        bounds = sorted({0, length, *(int(b) for b in generator.integers(0, length, 5))})
        stopped, moved = np.zeros(length, bool), np.zeros(length, bool)
        for field, spans in ((stopped, waits), (moved, moves)):
            for begin, end in spans:
                field[begin:end] = True
        for step in divide(bounds, waits, moves):
            here = slice(int(step.begin), int(step.end))
            assert step.computing == np.sum(~stopped[here])
            assert step.exchange == np.sum(stopped[here] & moved[here])
            assert step.waiting == np.sum(stopped[here] & ~moved[here])


def _three_ranks(folder: Path) -> None:
    """Ten buckets of ten steps of 1000 µs; rank 1 is always 300 µs late for "slow", and rank 2 90 µs for "fine"."""
    for rank in range(3):
        events = []
        for step in range(10):
            begin = 1000.0 * step
            for name, late in (("slow", 300.0 if rank == 1 else 0.0), ("fine", 90.0 if rank == 2 else 10.0 * rank)):
                at = begin + (100.0 if name == "slow" else 600.0) + late
                together = begin + (400.0 if name == "slow" else 690.0)
                events.append(_span(Row.PROGRAM, "WAIT", name, at, together + 50 - at))
                events.append(_span(Row.NEGOTIATION, "NEGOTIATE_GRADIENTS", name, at, together - at, number=step))
                events.append(_span(Row.EXCHANGE, "GRADIENTS", name, together, 50.0, number=step))
            mark = {"name": f"end of step {step}", "cat": "STEP", "ph": "i", "s": "t", "ts": begin + 1000.0}
            events.append({**mark, "tid": int(Row.STEP)})
        _write_file(folder, rank, events)


def test_the_summary_says_who_was_late_and_by_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _three_ranks(tmp_path / "ranks")
    assert main(["timeline", "merge", str(tmp_path / "ranks"), "-o", str(tmp_path / "trace.json")]) == 0
    assert "3 of 3 ranks" in capsys.readouterr().out
    events = check_chrome_trace(json.loads((tmp_path / "trace.json").read_text()))
    for path in ("trace.json", "ranks"):
        assert main(["timeline", "summarize", str(tmp_path / path)]) == 0
        text = capsys.readouterr().out
        assert main(["timeline", str(tmp_path / path)]) == 0 and capsys.readouterr().out == text
        rows = [" ".join(line.split()) for line in text.splitlines()]
        slow, fine = ("slow 10 300 µs 300 µs rank 1 (10 of 10)", "fine 10 90 µs 90 µs rank 2 (10 of 10)")
        assert rows.index(slow) < rows.index(fine)
        # Rank 1 is 300 and 10 µs behind the first; and alone kept the others waiting for 10 × 300 µs.
        assert "1 10 of 20 155 µs 300 µs 3.00 ms" in rows
        assert "2 10 of 20 45 µs 90 µs 800 µs" in rows
        # Rank 0: of 1000 µs it waits 350 for the one and 140 for the other, 50 each of these are exchange.
        assert "0 9 1.00 ms 510 µs (51%) 390 µs (39%) 100 µs (10%)" in rows
        assert "1 9 1.00 ms 820 µs (82%) 80 µs (8%) 100 µs (10%)" in rows
        assert "within 2 µs" in text
    steps = [event for event in events if event["cat"] == "STEP" and event["pid"] == 0]
    assert [event["name"] for event in steps] == [f"step {n}" for n in range(2, 11)]
    assert steps[0]["args"] == {
        **{"computing_ms": 0.51, "waiting_ms": 0.39, "exchange_ms": 0.1},
        **{"computing": "51.0%", "waiting": "39.0%", "exchange": "10.0%"},
    }


def test_the_commands_say_what_is_wrong(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "hvdlite", "timeline"]
    done = subprocess.run([*run, "summarize", str(tmp_path / "no.json")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"hvdlite: {tmp_path / 'no.json'}: there is no such file or folder.\n"
    assert "merge" in subprocess.run([*run, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout


def test_summarize_names_the_rank_that_waits_before_every_operation(tmp_path: Path) -> None:
    rounds, late = 8, 0.02
    submitted = [threading.Barrier(3) for _ in range(rounds)]

    def work() -> None:
        hvd.start_timeline(tmp_path / "trace.json")
        for turn in range(rounds):
            if hvd.rank() == 1:
                submitted[turn].wait(20)  # until the others have submitted theirs
                threading.Event().wait(late)
            handle = hvd.allreduce_async(np.ones(10), name="loss")
            if hvd.rank() != 1:
                submitted[turn].wait(20)
            handle.wait()
        hvd.stop_timeline()

    on_ranks(3, work)
    text = summarize(load([tmp_path / "trace.json"]))
    (row,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["allreduce.loss"])
    assert row[-5:] == ["rank", "1", f"({rounds}", "of", f"{rounds})"]
    mean, unit = float(row[2]), row[3]
    assert mean * {"ms": 1e-3, "s": 1.0}[unit] > late / 2


def test_a_bucket_is_noted_as_the_docstring_says(tmp_path: Path) -> None:
    ready = threading.Barrier(2)

    def work() -> None:
        timeline, ranks = world().timeline, (0, 1)
        assert not timeline.on
        timeline.step()  # does nothing while no timeline is kept
        with timeline.span(Row.PROGRAM, "WAIT", "gradients"):
            pass
        hvd.start_timeline(tmp_path / "trace.json")
        for step in range(3):
            with timeline.span(Row.PROGRAM, "WAIT", "gradients"):
                record = BucketRecord(timeline, "bucket 0", step, 64, ranks)
                ready.wait(20)
                record.ready()
                record.done()
            timeline.step()
        hvd.stop_timeline()

    on_ranks(2, work)
    trace = load([tmp_path / "trace.json"])
    events = check_chrome_trace(trace)
    for rank in range(2):
        own = [event for event in events if event["pid"] == rank]
        assert [event["name"] for event in own if event["cat"] == "STEP"] == ["step 2", "step 3"]
        assert sum(event["cat"] == "WAIT" and event["name"] == "gradients" for event in own) == 3
        for category in ("NEGOTIATE_GRADIENTS", "GRADIENTS"):
            numbers = [event["args"] for event in own if event["cat"] == category]
            assert numbers == [{"number": step, "bytes": 64} for step in range(3)]
    assert "bucket 0" in summarize(trace)


# Jobs


def test_a_job_of_three_ranks_leaves_one_trace(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    options = ("--timeline-filename", str(path), "--timeline-mark-cycles")
    ended = start("-np", "3", *options, "python", PROGRAM, "well", str(tmp_path)).end()
    assert ended.code == 0, ended.err
    trace = json.loads(path.read_text())
    events = check_chrome_trace(trace)
    assert not (tmp_path / "trace.json.ranks").exists()
    for rank in range(3):
        own = [event for event in events if event["pid"] == rank]
        assert sum(event["cat"] == "NEGOTIATE_ALLREDUCE" and event["name"] == "allreduce.loss" for event in own) == 5
        assert any(event["name"] == "CYCLE_START" for event in own)
    assert "rank 1 (5 of 5)" in summarize(trace)


def test_what_a_killed_rank_leaves_is_merged_and_says_who_waited_for_it(start: Start, tmp_path: Path) -> None:
    path, out = tmp_path / "trace.json", tmp_path / "merged.json"
    ended = start("-np", "3", "--timeline-filename", str(path), "python", PROGRAM, "killed", str(tmp_path)).end()
    assert ended.code == 137
    assert path.samefile(tmp_path / "trace.json.ranks" / "rank.0.json")
    assert main(["timeline", "merge", f"{path}.ranks", "-o", str(out)]) == 0
    trace = json.loads(out.read_text())
    events = check_chrome_trace(trace)
    assert trace["otherData"]["hvdlite"]["ranks"] == [0, 1, 2]
    for rank in range(3):
        assert any(event["pid"] == rank and event["name"] == "allreduce.loss" for event in events)
    assert {e["pid"] for e in events if e["cat"] == "UNFINISHED" and e["name"] == "allreduce.never"} == {0, 2}
    text = summarize(trace)
    assert "allreduce.never: submitted by ranks 0, 2; not by 1, or done there" in text
    # Any two of them make a trace, too.
    (tmp_path / "trace.json.ranks" / "rank.1.json").unlink()
    merge_files([tmp_path / "trace.json.ranks"], out)
    check_chrome_trace(json.loads(out.read_text()))
    assert "There are no files of ranks 1." in summarize(load([out]))
