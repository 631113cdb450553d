"""A rank that leaves an exchange in the middle, or the job: the others hear of it at once, as an error that can be caught."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, CommunicationError, HvdliteError, PeerLeftError
from hvdlite.protocols import TensorInfo
from hvdlite.testing import on_ranks
from hvdlite.watchdog.watchdog import Watchdog
from tests.support.jobs import PROGRAMS, Start, mpirun

LARGE = 100_000


def reducer() -> Any:
    return world().group().reducers.make([TensorInfo("float32", (LARGE,))])


def fail_in(collectives: Any, name: str, error: BaseException) -> None:
    """The next call of a collective fails, before it has met the others."""

    def failing(*_: Any, **__: Any) -> None:
        delattr(collectives, name)
        raise error

    setattr(collectives, name, failing)


@pytest.mark.parametrize(
    ("wait", "hosts"), [("operation", [0, 0, 0]), ("operation", [0, 0, 1]), ("gradients", [0, 0, 0])]
)
def test_a_rank_that_has_left_is_an_error_where_it_is_waited_for(wait: str, hosts: list[int]) -> None:
    """The commonest mistake: one batch more on some ranks."""

    def train() -> str:
        mine = reducer()
        for step in range(3 if hvd.rank() == 1 else 4):
            try:
                if wait == "gradients":
                    mine.exchange([True])
                else:
                    hvd.allreduce(np.ones(LARGE), name="loss")
            except PeerLeftError as error:
                assert step == 3
                with pytest.raises(PeerLeftError, match="rank 1 has left"):
                    mine.exchange([True]) if wait == "gradients" else hvd.barrier()
                return str(error)
        return ""

    texts = on_ranks(3, train, hosts=hosts, timeout=30)
    assert texts[1] == ""
    for text in (texts[0], texts[2]):
        awaited = "gradient exchange 4 of 1 tensors" if wait == "gradients" else "'loss': allreduce(float64(100000)"
        assert f"rank 1 has left the job, and this rank still waits for {awaited}" in text
        assert "rank 1: it has called shutdown()." in text
        assert ("gradient exchange 3" if wait == "gradients" else "'loss'") in text.partition("completed operation")[2]
        hint = "Different numbers of batches? Call hvd.join()" if wait == "gradients" else "if hvd.rank() == 0"
        assert hint in text


class OutOfPatience(BaseException):
    """As KeyboardInterrupt, which a test had better not raise."""


@pytest.mark.parametrize("error", [MemoryError("no room"), ValueError("late"), OutOfPatience("now")], ids=repr)
@pytest.mark.parametrize("what", ["allreduce", "allgather", "objects", "gradients"])
def test_a_rank_that_fails_inside_of_an_exchange(what: str, error: BaseException) -> None:
    calls: dict[str, Callable[[Any], Any]] = {
        "allreduce": lambda _: hvd.allreduce(np.ones(LARGE), name="x"),
        "allgather": lambda _: hvd.allgather(np.ones(LARGE), name="x"),
        "objects": lambda _: hvd.allgather_object("x" * LARGE, name="x"),
        "gradients": lambda mine: mine.exchange([True]),
    }
    inner = "allgather" if what == "objects" else what

    def work() -> tuple[str, str]:
        mine = reducer()
        if hvd.rank() == 1:
            if what == "gradients":
                fail_in(mine.buckets[0], "exchange", error)
            else:
                fail_in(world().engine()._collectives, inner, error)
            with pytest.raises(type(error), match=str(error)):
                calls[what](mine)
        else:
            with pytest.raises(PeerLeftError, match="rank 1 has failed in") as caught:
                calls[what](mine)
            assert f"{type(error).__name__}: {error}" in str(caught.value)
        with pytest.raises(CommunicationError) as later:
            calls[what](mine)
        return str(later.value), type(later.value).__name__

    outcomes = on_ranks(3, work, timeout=30)
    assert [name for _, name in outcomes] == ["PeerLeftError", "CommunicationError", "PeerLeftError"]
    assert "in the middle" in outcomes[1][0]


def test_an_error_of_all_ranks_leaves_them_in_step() -> None:
    def work() -> None:
        with pytest.raises(ArgumentError, match="shared_memory"):
            hvd.allreduce(np.ones(LARGE), algorithm="shared_memory")
        assert hvd.allreduce(np.ones(LARGE), hvd.Sum)[0] == 2

    on_ranks(2, work, hosts=[0, 1], timeout=30)


def test_the_end_of_a_stall_is_an_error() -> None:
    over = threading.Event()

    def work() -> str:
        mine = reducer()
        if hvd.rank() == 1:
            assert over.wait(20)
            return ""
        with pytest.raises(CommunicationError, match="the limit for one wait is 0.5 s") as caught:
            mine.exchange([True])
        over.set()
        return str(caught.value)

    texts = on_ranks(2, work, config=Config(stall_shutdown_time_seconds=0.5), timeout=30)
    assert "rank 1 is missing; it is here:" in texts[0] and "over.wait(20)" in texts[0]


def test_the_end_of_the_watch_itself_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Watchdog, needs: Any) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr("hvdlite.watchdog.deadlock.DeadlockDetector.look", broken)
    with pytest.raises(HvdliteError) as caught:
        on_ranks(2, lambda: threading.Event().wait(0.1) and None if hvd.rank() else hvd.barrier(), timeout=30)
    text = str(caught.value) + str(caught.value.__cause__)
    assert "watches over the waits of this rank has failed" in text and "a mistake of ours" in text


def test_an_operation_within_an_operation_of_the_same_thread() -> None:
    """What a signal handler does that has interrupted one."""

    def work() -> None:
        engine = world().engine()
        told: list[str] = []

        def handler(*_: Any, **__: Any) -> None:
            del engine._collectives.allgather  # type: ignore[method-assign]
            for call in (hvd.barrier, lambda: hvd.allreduce_async(np.ones(1)), hvd.join):
                with pytest.raises(HvdliteError, match="in a signal handler that has interrupted it") as caught:
                    call()
                told.append(str(caught.value))
            engine._collectives.allgather(*_, **__)

        engine._collectives.allgather = handler  # type: ignore[method-assign]
        assert hvd.allgather(np.ones(LARGE)).size == LARGE * hvd.size()
        assert len(told) == 3
        assert hvd.allreduce(np.ones(LARGE), hvd.Sum)[0] == hvd.size()

    on_ranks(2, work, timeout=30)


@pytest.mark.parametrize("name", [0, b"n", ("a",), 1.5])
def test_a_name_is_a_text(name: Any) -> None:
    def work() -> None:
        first = hvd.allreduce_async(np.full(1, 1.0), hvd.Sum)
        with pytest.raises(ArgumentError, match="expected a text"):
            hvd.allreduce_async(np.full(1, 10.0), hvd.Sum, name=name)
        assert first.wait() == 2.0
        assert hvd.allreduce(np.full(1, 10.0), hvd.Sum, name=np.str_("n")) == 20.0

    on_ranks(2, work, timeout=30)


def test_signals(start: Start) -> None:
    """Whatever is interrupted: results are right, or there is an error."""
    ended = start("-np", "2", "python", str(PROGRAMS / "signals.py")).end()
    assert ended.code == 0, ended.err
    for rank in range(2):
        assert f"[{rank}] in handlers: all right" in ended.out
        assert f"[{rank}] out of waits: all right" in ended.out
        assert f"[{rank}] out of small operations: all right" in ended.out
        assert f"[{rank}] out of exchanges: all right" in ended.out


@pytest.mark.costly
@pytest.mark.parametrize("launcher", ["hvdliterun", "mpirun"])
def test_a_signal_after_the_end_of_the_program(start: Start, launcher: str) -> None:
    program = str(PROGRAMS / "signal_at_exit.py")
    if launcher == "hvdliterun":
        ended = start("-np", "2", "python", program).end()
        assert (ended.code, ended.err) == (0, "")
        assert ended.out == "[1] rank 0 was told\n"
    else:
        done = mpirun(2, program, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "rank 0 was told\n"


def test_a_worker_that_dies_while_its_loop_is_torn_down(start: Start) -> None:
    """The reason is the rank's last word, though torch has raised it where nobody hears it."""
    ended = start("-np", "1", "python", str(PROGRAMS / "worker_dies_in_between.py")).end()
    assert ended.code == 1
    assert re.search(
        r"\nConnectionResetError: the connection to the data loader\nDataLoader worker \(pid \d+\) is killed by signal: Killed",
        ended.err,
    )
