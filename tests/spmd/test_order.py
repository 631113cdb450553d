"""Operations in any order on any rank, and what happens when they do not belong together."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.errors import DuplicateNameError, MismatchError


def test_a_thousand_operations_in_different_orders(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        kinds = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
        order = list(range(1000))
        random.Random(rank).shuffle(order)
        handles = {}
        for number in order:
            kind, name = kinds[number % 5], f"operation {number}"
            x = np.arange(size, dtype=np.float64) + 1000 * number + rank
            if kind == "allreduce":
                handles[number] = hvd.allreduce_async(x, hvd.Sum, name)
            elif kind == "allgather":
                handles[number] = hvd.allgather_async(x[:1], name)
            elif kind == "broadcast":
                handles[number] = hvd.broadcast_async(x, number % size, name)
            elif kind == "alltoall":
                handles[number] = hvd.alltoall_async(x, None, name)
            else:
                handles[number] = hvd.reducescatter_async(x, hvd.Max, name)
        random.Random(100 + rank).shuffle(order)
        everybody = np.arange(size)
        for number in order:
            base = np.arange(size) + 1000.0 * number
            expected = {
                "allreduce": size * base + everybody.sum(),
                "allgather": base[0] + everybody,
                "broadcast": base + number % size,
                "alltoall": base[rank] + everybody,
                "reducescatter": base[[rank]] + size - 1,
            }[kinds[number % 5]]
            np.testing.assert_array_equal(handles[number].wait(), expected)

    ranks(check)


def test_nobody_needs_to_wait_for_an_operation_to_be_done(ranks: Any) -> None:
    """An operation that one rank never waits for completes for the others."""

    def check() -> None:
        handle = hvd.allreduce_async(np.ones(3), hvd.Sum, name="left alone")
        if hvd.rank() == 0:
            assert handle.wait().tolist() == [hvd.size()] * 3
        hvd.barrier()

    ranks(check)


def mismatch(call: Any) -> str:
    """The text of the MismatchError that `call` raises."""
    with pytest.raises(MismatchError) as caught:
        call()
    assert hvd.allreduce(np.ones(1), hvd.Sum) == hvd.size()  # the job goes on
    return str(caught.value)


def mine(first: Any, others: Any) -> Any:
    """`first` on rank 0, `others` elsewhere."""
    return first if hvd.rank() == 0 else others


@pytest.mark.parametrize("name", [None, "a name"])
@pytest.mark.parametrize(
    ("call", "texts"),
    [
        (
            lambda name: hvd.allreduce(np.ones(mine(2, 3)), name=name),
            ["rank 0: allreduce(float64(2)", "allreduce(float64(3)"],
        ),
        (lambda name: hvd.allreduce(np.ones(2, mine("f4", "i4")), name=name), ["float32(2)", "int32(2)"]),
        (lambda name: hvd.allreduce(np.ones(2), mine(hvd.Sum, hvd.Max), name), ["op=sum", "op=max"]),
        (lambda name: hvd.allreduce(np.ones(2), name=name, prescale_factor=mine(1.0, 2.0)), ["prescale=2.0"]),
        (lambda name: hvd.allreduce(np.ones(2), name=name, algorithm=mine("ring", "tree")), ["=ring", "=tree"]),
        (lambda name: hvd.broadcast(np.ones(2), mine(0, 1), name), ["root_rank=0", "root_rank=1"]),
        (lambda name: hvd.broadcast_object(0, mine(0, 1), name), ["root_rank=0", "root_rank=1"]),
        (lambda name: hvd.allgather(np.ones((1, mine(2, 3))), name), ["float64(*, 2)", "float64(*, 3)"]),
        (lambda name: hvd.alltoall(np.ones((12, mine(2, 3))), name=name), ["float64(*, 2)", "float64(*, 3)"]),
        (lambda name: hvd.reducescatter(np.ones(mine(2, 3)), name=name), ["float64(2)", "float64(3)"]),
        (lambda name: mine(hvd.allgather, hvd.allreduce)(np.ones(2), name=name), ["allgather(", "allreduce("]),
        (
            lambda name: mine(hvd.barrier, hvd.allgather_object)(*mine((), (1,)), name=name),
            ["barrier(", "allgather_object("],
        ),
        (
            lambda name: hvd.allreduce([np.ones(1)] * 20 + [np.ones(mine(2, 3))], name=name),
            ["21 tensors, from number 20: float64(2)", "21 tensors, from number 20: float64(3)"],
        ),
        (
            lambda name: hvd.allreduce([np.ones(1)] * mine(2, 3), name=name),
            ["float64(1), float64(1), op", "float64(1), float64(1), float64(1)"],
        ),
    ],
)
def test_a_mismatch_raises_the_same_error_everywhere(ranks: Any, call: Any, texts: list[str], name: str | None) -> None:
    def check() -> str | None:
        return mismatch(lambda: call(name)) if hvd.size() > 1 else None

    errors = ranks(check)
    assert len(set(errors)) == 1
    if errors[0] is not None:
        assert (repr(name) if name else "unnamed operation 0") in errors[0] or name is None
        for text in texts:
            assert text in errors[0]
        assert "rank 0: " in errors[0]
        assert ("rank 1: " if len(errors) == 2 else f"ranks 1-{len(errors) - 1}: ") in errors[0]


@pytest.mark.parametrize("name", [None, "a name"])
def test_what_was_agreed_before_is_checked_all_the_same(ranks: Any, name: str | None) -> None:
    def check() -> list[str]:
        errors = []
        for _ in range(3):
            for length in (2, 3):  # so that the ranks know both, and each of them is right for some rank below
                for _ in range(2):
                    assert hvd.allreduce(np.ones(length), hvd.Sum, name).tolist() == [hvd.size()] * length
            if hvd.size() > 1:
                errors.append(mismatch(lambda: hvd.allreduce(np.ones(mine(2, 3)), hvd.Sum, name)))
        return errors

    for errors in ranks(check):
        for error in errors:
            assert "rank 0: allreduce(float64(2), op=sum)" in error
            assert "allreduce(float64(3), op=sum)" in error


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("names", [("a", "b"), (None, "b"), ("a", None)])
def test_different_names_raise_the_same_error_everywhere(ranks: Any, names: tuple[str | None, str | None]) -> None:
    def check() -> list[str] | None:
        return [mismatch(lambda: hvd.allreduce(np.ones(2), name=mine(*names))) for _ in range(2)]

    errors = ranks(check)
    assert all(error == errors[0] for error in errors)
    if errors[0] is not None:
        assert "rank 0 waits for" in errors[0][0]
        for name in names:
            assert (repr(name) if name else "unnamed operation") in errors[0][0]


def test_a_rank_that_comes_late_is_no_mismatch(ranks: Any) -> None:
    """Ranks that wait for a name which the others submit from another thread, later, are not told of a deadlock."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        handle = hvd.allreduce_async(np.ones(1), hvd.Sum, name="early")
        if rank == 0:
            assert hvd.allreduce(np.ones(1), hvd.Sum, name="late") == size
        assert handle.wait() == size
        if rank != 0:
            assert hvd.allreduce(np.ones(1), hvd.Sum, name="late") == size

    ranks(check)


def test_a_name_in_flight_cannot_be_used_again(ranks: Any) -> None:
    def check() -> None:
        handle = hvd.allreduce_async(np.ones(1), hvd.Sum, name="twice")
        with pytest.raises(DuplicateNameError, match="'twice' is still in flight"):
            hvd.allreduce(np.ones(1), hvd.Sum, name="twice")
        assert handle.wait() == hvd.size()
        assert hvd.allreduce(np.ones(1), hvd.Sum, name="twice") == hvd.size()

    ranks(check)


def test_operations_ready_together_share_an_exchange(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> int:
        engine = hvd.api.world().engine()
        exchanges = 0
        plain = engine._collectives.allreduce

        def count(*args: Any) -> None:
            nonlocal exchanges
            exchanges += 1
            plain(*args)

        engine._collectives.allreduce = count  # type: ignore[method-assign]
        with engine._driver._lock:  # so that nothing moves until all are submitted
            handles = [hvd.allreduce_async(np.full(5, n, np.float32), hvd.Sum, f"small {n}") for n in range(50)]
        for n, handle in enumerate(handles):
            assert handle.wait().tolist() == [n * hvd.size()] * 5
        hvd.barrier()
        del engine._collectives.allreduce
        return exchanges

    for exchanges in ranks(check):
        assert exchanges < 25


def test_threads_of_a_rank_share_the_engine(ranks: Any) -> None:
    def check() -> None:
        here, size = hvd.api.world(), hvd.size()
        failures: list[BaseException] = []

        def work(thread: int) -> None:
            try:
                with hvd.api.in_world(here):
                    for n in range(20):
                        assert hvd.allreduce(np.ones(2), hvd.Sum, f"thread {thread} {n}").tolist() == [size] * 2
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert not failures, failures

    ranks(check)


def test_results_are_not_kept_alive(ranks: Any) -> None:
    def check() -> None:
        x = np.ones(1000)
        handle = hvd.allreduce_async(x, name="short")
        result = weakref.ref(handle.wait())
        assert "short" not in hvd.api.world().engine()._in_flight._names
        before = sys.getrefcount(x)
        del handle
        hvd.barrier()  # nobody drives that any more, nor looks at the frames of who did, as one does who waits for long
        gc.collect()
        assert result() is None
        assert sys.getrefcount(x) <= before

    ranks(check)
