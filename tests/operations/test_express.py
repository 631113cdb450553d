"""Small blocking operations that run at once, without negotiation; and what happens if the ranks do not call the same."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.comm.host import Host
from hvdlite.config import Config
from hvdlite.errors import CommunicationError, DuplicateNameError, HvdliteError, MismatchError, PeerLeftError
from hvdlite.operations import Allreduce, Barrier
from hvdlite.operations.negotiation.express import Express
from hvdlite.protocols import Array, ReduceOp
from hvdlite.tensors.reduction import Reduction
from hvdlite.testing import on_ranks

LIMIT = 60


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank waits for the others for as long as it takes: on a busy machine they come late."""
    monkeypatch.setattr("hvdlite.operations.negotiation.express._SECONDS", 20.0)


def be_impatient() -> None:
    """Let this rank wait for nobody, from now on."""
    express = world().engine()._express
    assert express is not None
    express._ballot._seconds = 0.0


def plans() -> int:
    return world().engine()._driver.plans


CALLS: dict[str, Callable[[int], Any]] = {
    "float32": lambda rank: hvd.allreduce(np.full(3, rank + 1, np.float32), hvd.Sum).tolist() == [6] * 3,
    "average of integers": lambda rank: hvd.allreduce(np.array([rank, -1])).tolist() == [1, -1],
    "minimum of bool": lambda rank: hvd.allreduce(np.array([True, rank > 0]), hvd.Min).tolist() == [True, False],
    "bfloat16": lambda rank: hvd.allreduce(torch.full((5,), rank, dtype=torch.bfloat16)).tolist() == [1] * 5,
    "a list": lambda rank: (
        [each.item() for each in hvd.allreduce([np.ones(1), np.full(1, rank * 1.0)], hvd.Sum)] == [3, 3]
    ),
    "a factor": lambda rank: hvd.allreduce(np.ones(1), hvd.Sum, postscale_factor=2.0) == 6,
    "in place": lambda rank: hvd.allreduce(np.ones(1), hvd.Sum, inplace=True) == 3,
    "every second": lambda rank: hvd.allreduce(np.arange(6.0)[::2], hvd.Sum).tolist() == [0, 6, 12],
    "nothing": lambda rank: hvd.allreduce(np.empty((0, 2)), hvd.Sum).shape == (0, 2),
    "4 KiB": lambda rank: (hvd.allreduce(np.ones(1024, np.float32), hvd.Sum) == 3).all(),
    "5 KiB": lambda rank: (hvd.allreduce(np.ones(1280, np.float32), hvd.Sum) == 3).all(),
    "4 MiB": lambda rank: (hvd.allreduce(np.ones(2**20, np.float32)) == 1).all(),
    "a factor of each rank": lambda rank: hvd.allreduce(np.ones(1), hvd.Sum, prescale_factor=2.0) == 6,
    "two dtypes": lambda rank: (
        [each.item() for each in hvd.allreduce([np.ones(1), np.ones(1, "f4")], hvd.Sum)] == [3, 3]
    ),
    "adasum": lambda rank: hvd.allreduce(np.ones(2), hvd.Adasum).tolist() == [1, 1],
    "ring": lambda rank: hvd.allreduce(np.ones(1), hvd.Sum, algorithm="ring") == 3,
    "allgather": lambda rank: hvd.allgather(np.full(1, rank)).tolist() == [0, 1, 2],
    "uneven allgather": lambda rank: hvd.allgather(np.full(rank, rank)).tolist() == [1, 2, 2],
    "reducescatter": lambda rank: hvd.reducescatter(np.arange(3), hvd.Sum).tolist() == [3 * rank],
    "alltoall": lambda rank: hvd.alltoall(np.full(3, rank)).tolist() == [0, 1, 2],
    "broadcast": lambda rank: hvd.broadcast(np.full(2, rank), 1).tolist() == [1, 1],
    "broadcast of bfloat16": lambda rank: (
        hvd.broadcast(torch.full((2,), rank, dtype=torch.bfloat16), 2).tolist() == [2] * 2
    ),
    "barrier": lambda rank: not world().engine().run(Barrier()),
    "with a name": lambda rank: hvd.allreduce(np.ones(1), hvd.Sum, name="n") == 3,
}


@pytest.mark.parametrize("what", CALLS)
def test_nobody_is_asked(what: str) -> None:
    def work() -> int:
        assert CALLS[what](hvd.rank())  # the first time, the ranks agree on what the operation is called between them
        before = plans()
        for _ in range(20):
            assert CALLS[what](hvd.rank())
        return plans() - before

    assert on_ranks(3, work, timeout=LIMIT) == [0, 0, 0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: hvd.allreduce_async(np.ones(1), hvd.Sum).wait(),
        lambda: hvd.broadcast_object(1, 0),
    ],
)
def test_all_else_is_negotiated(call: Callable[[], Any]) -> None:
    def work() -> int:
        before = plans()
        for _ in range(3):
            call()
        return plans() - before

    assert on_ranks(2, work, timeout=LIMIT) == [3, 3]


def test_a_name_is_in_use_while_its_operation_runs_at_once() -> None:
    def work() -> None:
        large = np.ones(100_000)
        hvd.allreduce(large, hvd.Sum, name="x")
        collectives = world().engine()._collectives
        allreduce = collectives.allreduce

        def in_another_thread() -> None:
            with pytest.raises(DuplicateNameError):
                hvd.allreduce_async(large, hvd.Sum, name="x")

        def at_the_same_time(*arguments: Any) -> None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(contextvars.copy_context().run, in_another_thread).result(LIMIT)
            told.append(hvd.rank())
            allreduce(*arguments)

        collectives.allreduce = at_the_same_time  # type: ignore[method-assign, assignment]
        before = plans()
        assert (hvd.allreduce(large, hvd.Sum, name="x") == 2).all()
        assert plans() == before

    told: list[int] = []
    on_ranks(2, work, timeout=LIMIT)
    assert sorted(told) == [0, 1]


def test_ranks_of_two_hosts_negotiate() -> None:
    assert on_ranks(2, lambda: world().engine()._express is None, hosts=[0, 1], timeout=LIMIT) == [True, True]


def test_a_rank_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has waited in vain negotiates, and the ranks still get the same results. Later they run things at once again."""
    monkeypatch.setattr("hvdlite.operations.negotiation.express._SECONDS", 0.0)

    def work() -> tuple[list[float], int]:
        results = [hvd.allreduce(np.full(1, n), hvd.Sum).item() for n in range(200)]
        world().engine()._express._ballot._seconds = 20.0  # type: ignore[union-attr]
        for _ in range(40):  # at the latest in the sixteenth, all ranks try again
            hvd.barrier()
        before = plans()
        hvd.barrier()
        return results, plans() - before

    assert on_ranks(3, work, timeout=LIMIT) == [([3.0 * n for n in range(200)], 0)] * 3


def test_different_operations_are_explained() -> None:
    def work() -> None:
        for size in (1, 2):
            hvd.allreduce(np.ones(size), hvd.Sum)
        with pytest.raises(
            MismatchError, match=r"rank 0: allreduce\(float64\(1\)(.|\n)*rank 1: allreduce\(float64\(2\)"
        ):
            hvd.allreduce(np.ones(1 + hvd.rank()), hvd.Sum)
        assert hvd.allreduce(np.ones(1), hvd.Sum) == 2

    on_ranks(2, work, timeout=LIMIT)


def test_a_rank_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has joined shows nothing, and takes part with no values."""

    def work() -> list[float]:
        results = [hvd.allreduce(np.ones(1), hvd.Sum).item() for _ in range(4 + 4 * hvd.rank())]
        hvd.join()
        return [*results, hvd.allreduce(np.ones(1), hvd.Sum).item()]

    monkeypatch.setattr("hvdlite.operations.negotiation.express._SECONDS", 0.0)
    assert on_ranks(2, work, timeout=LIMIT) == [[2.0] * 5, [2.0] * 4 + [1.0] * 4 + [2.0]]


class OutOfPatience(BaseException):
    """As KeyboardInterrupt, which a test had better not raise."""


def raise_once(patch: pytest.MonkeyPatch, where: type, method: str) -> None:
    """Let rank 1 raise an error in its next call of a method, instead of the call."""
    whole, armed = getattr(where, method), [True]

    def interrupted(self: Any, *arguments: Any) -> Any:
        if hvd.rank() == 1 and armed:
            armed.clear()
            raise OutOfPatience
        return whole(self, *arguments)

    patch.setattr(where, method, interrupted)


@pytest.mark.parametrize(("where", "method"), [(Express, "_show"), (Host, "wait_briefly")])
def test_an_interrupted_rank_has_still_called_the_operation(
    where: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is interrupted in a negotiation."""
    ready = []

    def work() -> list[float]:
        results = [hvd.allreduce(np.ones(1), hvd.Sum).item() for _ in range(2)]
        be_impatient()
        if hvd.rank() == 1:
            raise_once(monkeypatch, where, method)
            with pytest.raises(OutOfPatience):
                hvd.allreduce(np.full(1, 10.0), hvd.Sum)
            ready.append(True)
        else:
            while not ready:  # rank 1 comes first, and waits
                hvd.size()
            results.append(hvd.allreduce(np.full(1, 20.0), hvd.Sum).item())
        return [*results, hvd.allreduce(np.ones(1), hvd.Sum).item()]

    assert on_ranks(2, work, timeout=LIMIT) == [[2.0, 2.0, 30.0, 2.0], [2.0, 2.0, 2.0]]


def test_a_rank_that_is_bound_and_interrupted_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> str:
        for _ in range(2):
            hvd.allreduce(np.ones(1), hvd.Sum)
        if hvd.rank() == 1:
            raise_once(monkeypatch, Reduction, "complete")
            monkeypatch.setattr(
                "hvdlite.operations.negotiation.express._complete", lambda how, *rest: how.complete(*rest)
            )
            with pytest.raises(OutOfPatience):
                hvd.allreduce(np.ones(1), hvd.Sum)
        else:
            assert hvd.allreduce(np.ones(1), hvd.Sum) == 2
        be_impatient()
        with pytest.raises(CommunicationError) as caught:
            hvd.allreduce(np.ones(1), hvd.Sum)
        return str(caught.value)

    texts = on_ranks(2, work, timeout=LIMIT)
    assert "rank 1 has failed in its part of" in texts[0] and "allreduce(float64(1)" in texts[0]
    assert "this rank has left its part of" in texts[1]


def test_a_rank_that_never_decides_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has shown its operation, and was stopped before it could see the others."""

    def work() -> None:
        for _ in range(2):
            hvd.allreduce(np.ones(1), hvd.Sum)
        if hvd.rank() == 1:
            world().engine()._express._ballot._all_show = gone  # type: ignore[union-attr, method-assign]
        else:
            assert shown.wait(LIMIT)
        be_impatient()
        with pytest.raises((PeerLeftError, OutOfPatience, CommunicationError)) as caught:
            hvd.allreduce(np.ones(1), hvd.Sum)
        if hvd.rank() == 0:
            texts.append(str(caught.value))
            over.set()

    def gone(*_: Any) -> bool:
        shown.set()
        assert over.wait(LIMIT)
        raise OutOfPatience

    shown, over, texts = threading.Event(), threading.Event(), list[str]()
    on_ranks(2, work, config=Config(stall_shutdown_time_seconds=0.5), timeout=LIMIT)
    assert "an operation that all ranks have called" in texts[0] and "rank 1" in texts[0]


def test_an_operation_within_an_operation_of_the_same_thread() -> None:
    """What a signal handler does that has interrupted one."""

    def work() -> None:
        hvd.allreduce(np.ones(1), hvd.Sum)
        express = world().engine()._express
        assert express is not None
        show, told = express._show, []

        def handler(data: Array) -> list[Array]:
            for call in (
                hvd.barrier,
                lambda: hvd.allreduce(np.ones(1)),
                lambda: hvd.allreduce_async(np.ones(1)),
                hvd.join,
            ):
                with pytest.raises(HvdliteError, match="in a signal handler that has interrupted it"):
                    call()
                told.append(call)
            return show(data)

        express._show = handler  # type: ignore[method-assign]
        assert hvd.allreduce(np.ones(1), hvd.Sum) == 2
        assert len(told) == 4

    on_ranks(2, work, timeout=LIMIT)


def test_the_largest_small_operation() -> None:
    """What is accumulated in a wider dtype counts as that."""
    for dtype, size, small in [
        ("float32", 1024, True),
        ("float32", 1025, False),
        ("int8", 512, True),
        ("int8", 513, False),
    ]:
        assert Allreduce(np.ones(size, dtype), ReduceOp.AVERAGE).is_small is small
