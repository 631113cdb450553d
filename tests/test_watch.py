"""Waits that last: who is missing, and where it is."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.config import Config
from hvdlite.errors import HvdliteError
from hvdlite.protocols import TensorInfo
from hvdlite.testing import on_ranks


def test_a_report_names_the_missing_rank_and_shows_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    reported = threading.Event()

    def stall() -> None:
        if hvd.rank() == 2:
            reported.wait(20)  # the line that the report must show
        handle = hvd.allreduce_async(np.ones(3), name="the gradients")
        while hvd.rank() != 2 and not handle.poll():
            if "is missing" in "".join(seen := [*printed, capfd.readouterr().err]):
                reported.set()
            printed[:] = seen
        handle.wait()

    # Asynchronous operations that are polled for are no waits; a blocking one on rank 1 is.
    printed: list[str] = []

    def blocking_on_one() -> None:
        if hvd.rank() == 1:
            hvd.allreduce(np.ones(3), name="the gradients")
        else:
            stall()

    on_ranks(3, blocking_on_one, config=Config(stall_check_time_seconds=0.3), timeout=30)
    text = "".join(printed)
    assert "rank 1 has waited" in text
    assert "for 'the gradients': allreduce(float64(3), op=average)" in text
    assert "rank 2 is missing; it is here:" in text
    assert "reported.wait(20)  # the line that the report must show" in text
    assert "is missing" not in text.partition("rank 2 is missing")[2].partition("rank 1 has waited")[0]


@pytest.mark.parametrize("what", ["an operation", "a gradient exchange", "inside of an operation"])
def test_past_the_second_limit_the_job_ends_with_the_report(what: str) -> None:
    over = threading.Event()

    def stall() -> None:
        reducer = world().reducer([TensorInfo("float32", (4,))])
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
        reducer = world().reducer([TensorInfo("float32", (4,))])
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
