"""Calls in the same order on all ranks: they are compared, run by whoever waits, and go on in the background."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.ordered.calls import CollectiveCall
from hvdlite.comm.ordered.communicator import Communicator
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, CommunicationError, HvdliteError, MismatchError, PeerLeftError
from hvdlite.protocols import ReduceOp
from hvdlite.testing import on_ranks
from tests.support.jobs import wait_for

Ranks = Callable[..., list[Any]]
SEVERAL = pytest.mark.ranks(at_least=2)


def everybody(name: str = "all", limit: float | None = None) -> Communicator:
    return world().communicators.new(range(hvd.size()), name, limit)


def total(value: float, nbytes: int = 8) -> CollectiveCall:
    """A call that sums a value over the ranks."""

    def run(collectives: HierarchicalCollectives) -> float:
        data = np.full(nbytes // 8, value)
        collectives.allreduce(data, ReduceOp.SUM)
        return float(data[-1])

    return CollectiveCall(f"sum({nbytes})", run)


def test_calls_run_in_their_order(ranks: Ranks) -> None:
    def check() -> None:
        group, size = everybody(), hvd.size()
        order: list[int] = []
        pending = [group.submit(total(number, 8 << number)) for number in range(12)]
        for number, each in enumerate(pending):
            group.then(each, lambda number=number: order.append(number))  # type: ignore[misc]
        assert group.run(total(100.0)) == 100.0 * size
        assert order == list(range(12))
        assert [group.wait(each) for each in reversed(pending)] == [size * number for number in range(11, -1, -1)]
        group.close()

    ranks(check)


@SEVERAL
def test_different_calls_raise_on_all_ranks_which_go_on(ranks: Ranks) -> None:
    def check() -> str:
        group = everybody("the team")
        with pytest.raises(MismatchError) as raised:
            group.run(total(1.0, 8 if hvd.rank() else 16))
        assert group.run(total(1.0)) == hvd.size()
        group.close()
        return str(raised.value)

    texts = ranks(check)
    assert set(texts) == {texts[0]}
    assert texts[0].startswith("the ranks of the team call different things:\n  rank 0: sum(16)\n  rank 1: sum(8)\n")


@SEVERAL
def test_members_alone_make_groups_even_of_equal_ranks(ranks: Ranks) -> None:
    def check() -> None:
        last = hvd.size() - 1
        if hvd.rank() in (0, last):
            groups = [world().communicators.new([0, last], f"pair {number}") for number in range(3)]
            assert len({group.members.id for group in groups}) == len(groups)
            order = range(3) if hvd.rank() else range(2, -1, -1)
            pending = {number: groups[number].submit(total(number)) for number in order}
            assert [groups[number].wait(pending[number]) for number in range(3)] == [0.0, 2.0, 4.0]
        hvd.barrier()

    ranks(check)


@SEVERAL
def test_groups_of_different_names_are_refused(ranks: Ranks) -> None:
    def check() -> str:
        with pytest.raises(MismatchError) as raised:
            everybody(f"group {hvd.rank()}")
        return str(raised.value)

    assert "rank 0: the making of group 0\n  rank 1: the making of group 1" in ranks(check)[1]


@SEVERAL
def test_a_call_that_nobody_waits_for_is_run(ranks: Ranks) -> None:
    def check() -> None:
        group = everybody()
        over = threading.Event()
        pending = group.submit(total(1.0))
        if hvd.rank():
            assert group.wait(pending) == hvd.size()
        else:
            group.then(pending, over.set)
            assert over.wait(30)
        group.close()

    ranks(check)


def test_the_background_thread_keeps_no_call_and_ends_with_the_group(ranks: Ranks) -> None:
    def check() -> None:
        group, over = everybody(), threading.Event()
        call = total(1.0)
        seen = weakref.ref(call.run)
        group.then(group.submit(call), over.set)
        assert over.wait(20)
        del call
        wait_for(lambda: seen() is None, 20)
        thread = group._calls._thread
        group.close()
        assert thread is not None and not thread.is_alive()

    ranks(check)


def test_a_group_ends_its_calls_before_it_closes(ranks: Ranks) -> None:
    def check() -> None:
        group = everybody()
        pending = [group.submit(total(float(number))) for number in range(5)]
        group.close()
        assert [each.result for each in pending] == [hvd.size() * number for number in range(5)]

    ranks(check)


def test_an_interrupted_wait_for_another_thread_breaks_the_group_off() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def interrupted(_: float | None) -> None:
        raise KeyboardInterrupt

    def check() -> None:
        group = everybody()
        if hvd.rank() == 1:
            group.run(CollectiveCall("stand", lambda _: None))
            with pytest.raises(PeerLeftError, match="KeyboardInterrupt"):
                group.run(total(1.0))
            go_on.set()
            return

        def stand(_: HierarchicalCollectives) -> None:
            inside.set()
            assert go_on.wait(30)

        runner = threading.Thread(target=group.run, args=(CollectiveCall("stand", stand),))
        runner.start()
        assert inside.wait(30)
        group._calls._something_is_over.wait = interrupted  # type: ignore[assignment, method-assign]
        with pytest.raises(KeyboardInterrupt):
            group.run(total(1.0))
        runner.join(30)
        with pytest.raises(CommunicationError, match="KeyboardInterrupt"):
            group.run(total(1.0))

    on_ranks(2, check)


def test_a_callback_may_not_call(ranks: Ranks) -> None:
    def check() -> None:
        group = everybody()
        errors: list[str] = []

        def callback() -> None:
            with pytest.raises(HvdliteError) as raised:
                group.submit(total(2.0))
            errors.append(str(raised.value))

        call = CollectiveCall("two calls", lambda collectives: callback())
        group.run(call)
        assert "sum(8) was called in the middle of another collective" in errors[0]
        assert "HVDLITE_OVERLAP=off" in errors[0]
        group.close()

    ranks(check)


def test_a_call_that_fails_raises_where_it_is_awaited(ranks: Ranks) -> None:
    def check() -> None:
        def fail(_: HierarchicalCollectives) -> None:
            raise ArgumentError("on all ranks alike")

        group = everybody()
        pending = group.submit(CollectiveCall("fail", fail))
        with pytest.raises(ArgumentError, match="on all ranks alike"):
            group.wait(pending)
        assert group.run(total(1.0)) == hvd.size()
        group.close()

    ranks(check)


def test_messages_go_on_without_a_wait(ranks: Ranks) -> None:
    def check() -> None:
        group = everybody()
        to, source = (hvd.rank() + 1) % hvd.size(), (hvd.rank() - 1) % hvd.size()
        for length in (0, 1, 1000, 1_000_000):
            group.isend(np.full(length, hvd.rank(), np.float32), to, tag=3)  # dropped, and sent nevertheless
            got = np.empty(length, np.float32)
            request = group.irecv(got, source, tag=3)
            request.wait()
            assert request.test()
            assert request.source == source
            assert (got == source).all()
        assert "message" in world().kinds
        hvd.barrier()
        group.close()

    ranks(check)


@pytest.mark.parametrize("length", [3, 5, 50_000])
def test_a_message_of_another_size_is_refused_and_writes_nothing(ranks: Ranks, length: int) -> None:
    def check() -> None:
        group = everybody()
        to, source = (hvd.rank() + 1) % hvd.size(), (hvd.rank() - 1) % hvd.size()
        group.isend(np.zeros(length), to)
        memory = np.full(50_000, 7.0)
        with pytest.raises(ArgumentError, match="was to be"):
            group.irecv(memory[:4], source).wait()
        assert (memory == 7.0).all()
        hvd.barrier()
        group.close()

    ranks(check)


def test_a_closed_group_says_so(ranks: Ranks) -> None:
    def check() -> None:
        group = everybody("the team")
        assert group.is_open
        hvd.barrier()
        group.close()
        group.close()
        assert not group.is_open
        with pytest.raises(HvdliteError, match="the team is closed"):
            group.run(total(1.0))

    ranks(check)


@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 2]])
def test_calls_on_several_hosts_are_compared(hosts: list[int]) -> None:
    def check() -> None:
        group = everybody()
        assert group.run(total(1.0, 2**17)) == 3.0
        with pytest.raises(MismatchError):
            group.run(total(1.0, 8 if hvd.rank() else 16))
        assert group.run(total(1.0)) == 3.0

    on_ranks(3, check, hosts=hosts)


def test_a_rank_that_has_left_is_named() -> None:
    def check() -> str:
        group = everybody("the team")
        if hvd.rank() == 1:
            return ""
        with pytest.raises(PeerLeftError) as raised:
            group.run(total(1.0))
        return str(raised.value)

    assert "rank 1 has left the job, and this rank still waits for sum(8) of the team" in on_ranks(2, check)[0]


def test_the_limit_of_a_group_ends_a_wait_with_a_report() -> None:
    go_on = threading.Event()

    def check() -> str:
        group = everybody("the team", limit=0.3)
        if hvd.rank() == 1:
            go_on.wait(30)
            return ""
        with pytest.raises(CommunicationError) as raised:
            group.run(total(1.0))
        go_on.set()
        return str(raised.value)

    text = on_ranks(2, check)[0]
    assert "rank 1 is missing" in text
    assert "the limit for one wait is 0.3 s" in text


def test_ranks_that_wait_for_each_other_in_two_groups_are_told() -> None:
    def check() -> str:
        groups = [everybody("the first"), everybody("the second")]
        with pytest.raises(MismatchError) as raised:
            groups[hvd.rank()].run(total(1.0))
        return str(raised.value)

    texts = on_ranks(2, check, config=Config(deadlock_time_seconds=0.2))
    assert all("the first" in text and "the second" in text for text in texts)
