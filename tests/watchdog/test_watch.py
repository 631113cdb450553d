"""Waits that last: who is missing, and where it is."""

from __future__ import annotations

import re
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.api import in_world, world
from hvdlite.config import Config
from hvdlite.errors import HvdliteError, MismatchError
from hvdlite.launch import cli
from hvdlite.launch.parser import make_parser
from hvdlite.protocols import TensorInfo
from hvdlite.ranks.topology import Members
from hvdlite.testing import on_ranks
from hvdlite.watchdog import stall_report
from hvdlite.watchdog.stall_report import StallAnswer, reporter, stack_of
from hvdlite.watchdog.waits import Wait
from hvdlite.watchdog.watchdog import Watchdog
from tests.support.jobs import PROGRAMS, Start


def test_a_report_names_the_missing_rank_and_shows_its_line(caplog: pytest.LogCaptureFixture) -> None:
    """The report is a record of `logging`, so it reaches the handlers of a program, with the rank that has waited."""
    reported = threading.Event()

    def stall() -> None:
        if hvd.rank() == 2:
            reported.wait(20)  # the line that the report must show
        handle = hvd.allreduce_async(np.ones(3), name="the gradients")
        while hvd.rank() != 2 and not handle.poll():
            if "is missing" in caplog.text:
                reported.set()
        handle.wait()

    # Asynchronous operations that are polled for are no waits; a blocking one on rank 1 is.
    def blocking_on_one() -> None:
        if hvd.rank() == 1:
            hvd.allreduce(np.ones(3), name="the gradients")
        else:
            stall()

    on_ranks(3, blocking_on_one, config=Config(stall_check_time_seconds=0.3), timeout=30)
    (record,) = [record for record in caplog.records if record.name == "hvdlite.stalls"]
    assert record.__dict__["rank"] == 1 and record.levelname == "WARNING"
    text = record.getMessage()
    assert "rank 1 has waited" in text
    assert "for 'the gradients': allreduce(float64(3), op=average)" in text
    assert "rank 2 is missing; it is here:" in text
    assert "reported.wait(20)  # the line that the report must show" in text
    assert "is missing" not in text.partition("rank 2 is missing")[2]


@pytest.mark.parametrize("what", ["an operation", "a gradient exchange", "inside of an operation"])
def test_past_the_second_limit_the_job_ends_with_the_report(what: str) -> None:
    over = threading.Event()

    def stall() -> None:
        reducer = world().group().reducers.make([TensorInfo("float32", (4,))])
        if what == "inside of an operation":
            engine = world().engine()
            if hvd.rank() == 1:  # has agreed to the operation, and is stuck in its part of it
                engine._collectives.allreduce = lambda *_: over.wait(20)  # type: ignore[method-assign]
            hvd.allreduce(np.ones(3), name="agreed")
        elif hvd.rank() == 1:
            assert over.wait(20)
        elif what == "an operation":
            hvd.barrier(name="the end")
        else:
            reducer.exchange([True])

    def check() -> None:
        try:
            stall()
        finally:
            over.set()

    with pytest.raises(HvdliteError, match="limit for one wait is 0.5 s|failed") as caught:
        on_ranks(2, check, config=Config(stall_shutdown_time_seconds=0.5), timeout=30)
    text = str(caught.value) + str(caught.value.__cause__)
    assert "the limit for one wait is 0.5 s" in text
    awaited = {
        "an operation": "'the end': barrier()",
        "a gradient exchange": "gradient exchange 1",
        "inside of an operation": "its part of 'agreed': allreduce(float64(3)",
    }
    assert awaited[what] in text
    if what != "inside of an operation":
        assert "over.wait(20)" in text


def test_a_peer_that_has_left_ends_a_gradient_exchange() -> None:
    def leave() -> None:
        reducer = world().group().reducers.make([TensorInfo("float32", (4,))])
        if hvd.rank() == 0:
            reducer.exchange([True])

    with pytest.raises(HvdliteError) as caught:
        on_ranks(2, leave, timeout=30)
    text = str(caught.value) + str(caught.value.__cause__)
    assert "rank 1 has left the job, and this rank still waits for gradient exchange 1" in text


def test_a_peer_that_leaves_after_its_part_is_done_is_no_failure() -> None:
    def check() -> None:
        for _ in range(20):
            hvd.allreduce(np.ones(3))

    for _ in range(10):
        on_ranks(3, check, timeout=30)


STALLS = str(PROGRAMS / "stalls.py")


@pytest.mark.costly
@pytest.mark.parametrize("how", ["sleep", "skip"])
def test_hvdliterun_shows_where_a_missing_rank_is_and_what_it_did_last(start: Start, how: str, tmp_path: Path) -> None:
    release = tmp_path / "release"
    job = start("-np", "3", "--stall-check-warning-time-seconds", "0.3", "python", STALLS, how, str(release))
    assert job.process.stderr is not None
    seen = ""
    while "last completed operation" not in seen:
        line = job.process.stderr.readline()
        assert line, seen
        seen += line
    assert "[0] hvdlite: rank 0 has waited" in seen
    assert "for 'second': allreduce(float64(3), op=average)." in seen
    assert "rank 1 waits for it too." in seen
    stack = seen.partition("rank 2 is missing; it is here:")[2]
    assert f'{STALLS}", line' in stack
    assert "time.sleep(0.01)  # the line that rank 2 is on" in stack
    assert "runpy" not in stack
    assert "ago: 'first': allreduce(float64(3), op=average)" in stack
    release.touch()
    ended = job.end()
    if how == "sleep":
        assert ended.code == 0
    else:
        assert ended.code == 1
        assert "rank 2 has left the job, and this rank still waits for 'second'" in ended.err


@pytest.mark.slow
def test_a_rank_that_diverges_is_named_with_its_line_and_the_job_ends(start: Start, tmp_path: Path) -> None:
    # Ranks that all wait for different operations are told so sooner, unless that takes longer than the report.
    patient = {"HVDLITE_DEADLOCK_TIME_SECONDS": "50"}
    limits = ("--stall-check-warning-time-seconds", "0.3", "--stall-check-shutdown-time-seconds", "4")
    ended = start("-np", "3", *limits, "python", STALLS, "diverge", str(tmp_path / "never"), env=patient).end()
    assert ended.code == 1
    assert "the limit for one wait is 4 s" in ended.err
    # Rank 0 reports its wait and rank 2 its own, and either may end the job: both say where rank 2 is.
    line = 'alone = hvd.allreduce(np.ones(3), name="another")  # the line that rank 2 is on'
    reports = re.split(r"hvdlite: (?=rank \d has waited)", ended.err)[1:]
    assert {report.split()[1] for report in reports} == {"0", "2"}
    for report in reports:
        assert line in report
        if report.startswith("rank 0"):
            assert "rank 2 waits for something else, 'another': allreduce(float64(3), op=average)" in report


def test_the_lowest_rank_that_has_waited_long_enough_reports() -> None:
    def answer(*waits: tuple[str, float]) -> StallAnswer:
        return StallAnswer(waits, "", None)

    both = {0: answer(("a", 70.0)), 1: answer(("b", 80.0), ("a", 61.0)), 2: answer()}
    assert reporter("a", both, 60.0) == 0
    assert reporter("b", both, 60.0) == 1
    assert reporter("c", both, 60.0) is None
    newcomer = {0: answer(("a", 5.0)), 1: answer(("a", 61.0))}
    assert reporter("a", newcomer, 60.0) == 1
    nearly = {0: answer(("a", 58.0)), 1: answer(("a", 61.0))}
    assert reporter("a", nearly, 60.0) == 0, "it reports in a moment itself"


def test_a_deep_stack_is_shown_from_both_ends() -> None:
    def dive(depth: int) -> str:
        if depth:
            return dive(depth - 1)
        return stack_of(threading.get_ident())

    text = dive(40)
    assert "more calls …" in text
    assert text.count("\n") < 60
    thread = threading.Thread(target=lambda: shown.append(dive(2)))
    shown: list[str] = []
    thread.start()
    thread.join()
    assert "more calls" not in shown[0]
    assert "return stack_of(threading.get_ident())" in shown[0].splitlines()[-1]


def test_time_in_which_the_process_was_stopped_is_nobodys_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    real, stopped, looked = time.monotonic, threading.Event(), threading.Semaphore(0)

    class Clock:
        @staticmethod
        def monotonic() -> float:
            if not stopped.is_set():
                return real()
            looked.release()
            return real() + 1000.0

    for module in ("watchdog", "waits"):  # the waits that begin after the stop have the same clock
        monkeypatch.setattr(f"hvdlite.watchdog.{module}.time", Clock)

    def wait() -> None:
        here = world()
        if hvd.rank() == 1:
            entered.wait(20)
            stopped.set()
            for _ in range(12):  # the threads of both ranks have looked at all waits meanwhile, several times
                assert looked.acquire(timeout=20)
            hvd.barrier(name="the end")
        else:
            handle = hvd.barrier_async(name="the end")
            begin = here.watch.begin
            number = begin(Wait(lambda: "the wait", Members(0, (0, 1)), failures.append))

            def begin_and_tell(wait: Wait) -> int:
                watched = begin(wait)
                entered.set()  # no earlier: a wait that is not watched yet would have begun before the stop
                return watched

            here.watch.begin = begin_and_tell  # type: ignore[method-assign]
            handle.wait()
            here.watch.end(number)

    failures: list[HvdliteError] = []
    entered = threading.Event()
    on_ranks(2, wait, config=Config(stall_shutdown_time_seconds=500.0, stall_check_time_seconds=400.0), timeout=40)
    assert not failures


@pytest.mark.parametrize(
    ("flags", "disabled", "report", "end"),
    [
        ([], False, 60.0, 1800.0),
        (["--stall-check"], False, 10.0, 300.0),
        (["--stall-check", "--stall-check-warning-time-seconds", "3"], False, 3.0, 300.0),
        (["--stall-check-shutdown-time-seconds", "0"], False, 60.0, 0.0),
        (["--no-stall-check"], True, 60.0, 1800.0),
    ],
)
def test_the_limits_that_options_set(flags: list[str], disabled: bool, report: float, end: float) -> None:
    options = make_parser().parse_args([*flags, "-np", "2", "train.py"])
    settings = {name: str(value) for name, value in cli._stall_settings(options).items() if value is not None}
    config = Config.from_env(settings)
    assert (config.stall_check_disable, config.stall_check_time_seconds) == (disabled, report)
    assert config.stall_shutdown_time_seconds == end


def test_a_thread_that_has_ended_is_not_mistaken_for_one_with_its_number() -> None:
    """Ranks that wait for each other are told so, though a thread lives that has the number of one that used hvdlite."""
    over, numbers = threading.Event(), dict.fromkeys(range(2), 0)

    def check() -> None:
        here, rank = world(), hvd.rank()

        def submit() -> None:
            with in_world(here):
                hvd.barrier("of another thread")
                numbers[rank] = threading.get_ident()

        first = threading.Thread(target=submit)
        first.start()
        first.join(20)
        others = []
        while numbers[rank] not in [other.ident for other in others] and len(others) < 100:
            others.append(threading.Thread(target=over.wait, args=(30,), daemon=True))
            others[-1].start()
        with pytest.raises(MismatchError, match="every rank waits"):
            hvd.barrier(f"of {rank}")

    try:
        on_ranks(2, check, config=Config(deadlock_time_seconds=0.3), timeout=20)
    finally:
        over.set()


def test_a_wait_that_is_over_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may refer to an exchange, whose memory goes with it."""

    class Holder:
        def __call__(self) -> str:
            return "something"

    looked = threading.Semaphore(0)
    look = Watchdog._look

    def note(watch: Watchdog, *times: float) -> None:
        look(watch, *times)
        if watch is mine:
            looked.release()

    def work() -> None:
        nonlocal mine
        mine = world().watch
        holder = Holder()
        gone = weakref.ref(holder)
        with mine.guarded(holder, world().group().members, remember=False):
            for _ in range(2):  # the second look has begun meanwhile
                assert looked.acquire(timeout=20)
        del holder
        for _ in range(2):
            assert looked.acquire(timeout=20)
        assert gone() is None

    mine: Watchdog | None = None
    monkeypatch.setattr(Watchdog, "_look", note)
    on_ranks(2, lambda: work() if hvd.rank() == 0 else None, timeout=60)


def test_the_files_that_nothing_interrupts_are_known() -> None:
    """Where a thread may be inside of MPI while there is a watchdog: in the files whose classes call a communicator."""
    comm = Path(hvd.__file__).parent / "comm"
    blocking = [path for path in comm.rglob("*.py") if re.search(r"\bself\._?comm\.[A-Z]\w+\(", path.read_text())]
    assert {*map(str, blocking), str(comm / "local.py")} == set(stall_report._MESSAGES)
