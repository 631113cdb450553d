"""The core of the parameter server, driven one request at a time: every interleaving can be tried, and nothing sleeps."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.async_sgd.clocks import Clocks
from hvdlite.async_sgd.deal import deal
from hvdlite.async_sgd.messages import Answer, Purpose, Request
from hvdlite.async_sgd.part import Push
from hvdlite.async_sgd.server import Mode, Reply, Server
from hvdlite.protocols import Array


class Sum:
    """A part whose value is the sum of everything that was applied. A gradient is one number."""

    def __init__(self) -> None:
        self.value = Fraction(0)
        self.steps: list[list[int]] = []

    def step(self, pushes: Sequence[Push]) -> None:
        numbers = [int(push.gradients.view(np.int64)[0]) for push in pushes]
        weights = [Fraction(push.weight) for push in pushes]
        self.steps.append(numbers)
        self.value += sum(n * w for n, w in zip(numbers, weights, strict=True)) / sum(weights)

    def read(self, into: Array) -> None:
        raise NotImplementedError


def push_of(number: int, settings: bytes = b"", weight: float = 1.0) -> Push:
    return Push(np.array([number]).view(np.uint8), np.array([True]), settings, weight)


class Run:
    """Workers that push numbers, and the order in which their requests reach the server."""

    def __init__(self, mode: Mode, staleness: int | None, steps: Sequence[int]) -> None:
        self.part = Sum()
        self.workers = range(len(steps))
        self.server = Server(self.part, self.workers, [], mode, staleness, self.workers)
        self.left = list(steps)
        self.made = [0] * len(steps)
        self.answered = [0] * len(steps)
        self.waits: set[int] = set()
        self.finished: set[int] = set()
        self.over: list[int] = []

    def able(self) -> list[int]:
        """The workers that can make a request now."""
        return [worker for worker in self.workers if worker not in self.waits | self.finished]

    def request(self, worker: int) -> None:
        """Let a worker make its next request: a push, or in the end, to finish."""
        if self.left[worker]:
            replies = self.server.push(worker, self.made[worker], push_of(1000 * worker + self.made[worker]))
            self.left[worker] -= 1
            self.made[worker] += 1
            self.waits.add(worker)
        else:
            self.finished.add(worker)
            replies = self.server.meet(worker, Purpose.FINISH)
        for reply in replies:
            assert not reply.error, reply.error
            if reply.purpose is Purpose.FINISH:
                self.over.append(reply.rank)
            else:
                self.waits.remove(reply.rank)
                self.answered[reply.rank] += 1

    def step_of(self, worker: int) -> int:
        """The step on which a worker works: the one after those for which it has an answer."""
        return self.answered[worker]


SPEEDS = st.lists(st.integers(0, 12), min_size=1, max_size=5)


@given(SPEEDS, st.integers(0, 4), st.data())
def test_no_worker_gets_more_than_the_staleness_ahead(steps: list[int], staleness: int, data: st.DataObject) -> None:
    run = Run(Mode.SSP, staleness, steps)
    widest = 0
    while able := run.able():
        run.request(data.draw(st.sampled_from(able)))
        training = [worker for worker in run.workers if worker not in run.finished]
        if training:
            gap = max(map(run.step_of, training)) - min(map(run.step_of, training))
            assert gap <= staleness
            widest = max(widest, gap)
            assert run.able(), "nobody can go on"
    assert run.over == list(run.workers)
    assert run.server.applied == sum(steps)


@given(st.integers(0, 5), st.integers(2, 4))
def test_the_staleness_is_used_up(staleness: int, size: int) -> None:
    """One worker does nothing, and each other one gets exactly so far."""
    run = Run(Mode.SSP, staleness, [100] * size)
    while able := [worker for worker in run.able() if worker]:
        run.request(able[0])
    assert run.made == [0, *[staleness + 1] * (size - 1)]  # the last push was made, and is not answered
    assert run.server.applied == (staleness + 1) * (size - 1)  # but applied
    assert [run.step_of(worker) for worker in run.workers] == [0, *[staleness] * (size - 1)]
    run.request(0)
    assert not run.waits


@pytest.mark.parametrize("mode", Mode)
@given(steps=SPEEDS, data=st.data())
def test_every_push_is_applied_once(mode: Mode, steps: list[int], data: st.DataObject) -> None:
    run = Run(mode, 2 if mode is Mode.SSP else None, steps)
    while able := run.able():
        run.request(data.draw(st.sampled_from(able)))
    assert run.over == list(run.workers) and run.server.is_over
    applied = [number for step in run.part.steps for number in step]
    assert sorted(applied) == sorted(1000 * worker + n for worker, count in enumerate(steps) for n in range(count))
    for worker in run.workers:  # in their order
        own = [number for number in applied if number // 1000 == worker]
        assert own == sorted(own)
    if mode is Mode.SYNC:
        # Each step has one push of each worker that still trains, in the order of the workers.
        assert all(step == sorted(step) and len({n % 1000 for n in step}) == 1 for step in run.part.steps)
        assert len(run.part.steps) == max(steps)
    else:
        assert all(len(step) == 1 for step in run.part.steps)
        assert run.part.value == sum(applied)


@given(data=st.data(), mode=st.sampled_from(Mode))
def test_meetings_in_the_middle(data: st.DataObject, mode: Mode) -> None:
    """Three workers and a rank that only serves meet twice; each worker makes its own number of pushes in between."""
    part, workers = Sum(), range(3)
    server = Server(part, workers, [3], mode, 1 if mode is Mode.SSP else None, range(4))
    made = [0, 0, 0]
    for purpose in (Purpose.PULL, Purpose.STATE, Purpose.FINISH):
        left = [*data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=3)), 0]
        waits: set[int] = set()
        met: list[Reply] = []
        while not met:
            rank = data.draw(st.sampled_from([rank for rank in range(4) if rank not in waits]))
            waits.add(rank)
            if left[rank]:
                left[rank] -= 1
                made[rank] += 1
                replies = server.push(rank, made[rank] - 1, push_of(1))
            else:
                replies = server.meet(rank, Purpose.SERVE if rank == 3 else purpose)
            assert not any(reply.error for reply in replies)
            waits.difference_update(reply.rank for reply in replies)
            met = [reply for reply in replies if reply.purpose is not Purpose.PUSH]
        assert [(reply.rank, reply.purpose) for reply in met] == [(rank, purpose) for rank in range(4)]
        assert server.applied == sum(made)
        assert server.is_over == (purpose is Purpose.FINISH)


def test_how_many_pushes_of_others_a_push_has_missed() -> None:
    server = Server(Sum(), range(2), [], Mode.ASYNC, None, range(2))
    missed = [server.push(worker, n, push_of(1))[0].missed for worker, n in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2))]
    assert missed == [0, 0, 2, 0, 2]


def test_a_push_that_was_lost_or_came_twice_is_an_error_for_good() -> None:
    for number in (0, 2):
        server = Server(Sum(), range(2), [], Mode.ASYNC, None, [4, 7])
        server.push(1, 0, push_of(1))
        (reply,) = server.push(1, number, push_of(1))
        assert f"rank 7 has sent push {number} after 1 pushes" in reply.error
        assert server.push(0, 0, push_of(1))[0].error == server.meet(1, Purpose.FINISH)[0].error == reply.error
        assert server.applied == 1


def test_those_that_wait_learn_of_an_error() -> None:
    server = Server(Sum(), range(3), [3], Mode.SYNC, None, range(4))
    assert server.push(0, 0, push_of(1)) == server.meet(3, Purpose.SERVE) == server.push(1, 0, push_of(1)) == []
    replies = server.push(2, 0, push_of(1, settings=b"other"))
    assert [reply.rank for reply in replies] == [0, 1, 2, 3]
    assert all("different learning rates" in reply.error for reply in replies)


def test_the_mean_is_by_weights_and_over_those_that_train() -> None:
    part = Sum()
    server = Server(part, range(3), [], Mode.SYNC, None, range(3))
    server.push(0, 0, push_of(10, weight=3))
    server.push(1, 0, push_of(2, weight=1))
    assert [reply.rank for reply in server.meet(2, Purpose.FINISH)] == [0, 1]  # which frees the others
    assert part.value == 8


def test_clocks() -> None:
    clocks = Clocks([0, 1], 1)
    clocks.tick(0)
    assert clocks.may_go_on(0) and clocks.made(0) == 1
    clocks.tick(0)
    assert not clocks.may_go_on(0) and clocks.may_go_on(1)
    clocks.leave(1)
    assert clocks.may_go_on(0) and list(clocks.training) == [0]
    clocks.begin_again()
    assert clocks.made(0) == clocks.made(1) == 0


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 6))
def test_tensors_are_dealt_out(sizes: list[int], count: int) -> None:
    servers = range(2, 2 + count)
    layouts = deal(sizes, servers)
    assert sorted(number for layout in layouts for number in layout.tensors) == list(range(len(sizes)))
    assert [layout.server for layout in layouts] == list(servers)[: len(layouts)]
    loads = [sum(sizes[number] for number in layout.tensors) for layout in layouts]
    # No load is above the mean by more than one tensor, which is in it.
    assert max(loads, default=0) <= sum(sizes) / count + max(sizes, default=0)
    for layout in layouts:
        ends = [start + sizes[number] for start, number in zip(layout.starts, layout.tensors, strict=True)]
        assert all(start % 16 == 0 for start in layout.starts)
        assert all(end <= start for end, start in zip(ends, [*layout.starts[1:], layout.nbytes], strict=True))


@given(st.integers(0, 2**53), st.floats(0, allow_infinity=False), st.integers(0, 2**31), st.booleans())
def test_messages_come_back_as_they_were(number: int, weight: float, nbytes: int, flag: bool) -> None:
    request = Request(Purpose.PUSH, number, nbytes, flag, weight)
    assert Request.unpack(request.pack()) == request
    answer = Answer(Purpose.LOAD, nbytes, number)
    assert Answer.unpack(answer.pack()) == answer
