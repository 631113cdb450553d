"""The core of the parameter server, driven one request at a time: every interleaving can be tried, and nothing sleeps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.async_sgd.compensation import DCASGD, DelayCompensation, StalenessRate
from hvdlite.async_sgd.deal import ServerLayout, deal
from hvdlite.async_sgd.early import EarlyChunks
from hvdlite.async_sgd.messages import Purpose, ServerAnswer, WorkerRequest
from hvdlite.async_sgd.part import Push
from hvdlite.async_sgd.rows import Rows, pack_rows, unpack_rows
from hvdlite.async_sgd.server import Clocks, Mode, ParameterServer, Reply
from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array

ONE = ServerLayout(0, (0,), (0,), 8)
"""A part of one tensor of 8 bytes."""


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
        into.view(np.float64)[0] = self.value


def push_of(number: int, settings: bytes = b"", weight: float = 1.0) -> Push:
    return Push(np.array([number]).view(np.uint8), np.array([True]), np.array([True]), {}, settings, weight)


class Run:
    """Workers that push numbers, and the order in which their requests reach the server."""

    def __init__(self, mode: Mode, staleness: int | None, steps: Sequence[int]) -> None:
        self.part = Sum()
        self.workers = range(len(steps))
        self.server = ParameterServer(self.part, ONE, self.workers, [], mode, staleness, self.workers)
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
        self.take(replies)

    def take(self, replies: Sequence[Reply]) -> None:
        """Take the answers that are due."""
        for reply in replies:
            assert not reply.error, reply.error
            assert reply.values.view(np.float64)[0] == float(self.part.value)
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
    server = ParameterServer(part, ONE, workers, [3], mode, 1 if mode is Mode.SSP else None, range(4))
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


def two_chunks(monkeypatch: pytest.MonkeyPatch) -> ServerLayout:
    """Return a part of two tensors, each a chunk of its own."""
    monkeypatch.setattr("hvdlite.async_sgd.deal._CHUNK_BYTES", 16)
    layout = ServerLayout(0, (0, 1), (0, 16), 32)
    assert len(layout.chunks) == 2
    return layout


class Pair:
    """A part that notes the numbers of each push that it applies: those of its two tensors, where they are present."""

    def __init__(self) -> None:
        self.applied: list[tuple[int, ...]] = []

    def step(self, pushes: Sequence[Push]) -> None:
        for push in pushes:
            numbers = push.gradients.view(np.int64)[::2].tolist()
            self.applied.append(tuple(n for n, there in zip(numbers, push.present.tolist(), strict=True) if there))

    def read(self, into: Array) -> None:
        pass


class Speculator:
    """A worker that sends chunks of a push early, some of them wrong or twice, and again with the push if they were wrong."""

    def __init__(self, draw: random.Random, server: ParameterServer, rank: int) -> None:
        self._draw, self._server, self._rank = draw, server, rank
        self.left, self._made = draw.randint(0, 4), 0
        self.pushed: list[tuple[int, ...]] = []
        self._memory = np.zeros(4, np.int64)
        self._begin()

    def _begin(self) -> None:
        number = 1 + self._made + 100 * self._rank
        self._gradients = [number, -number]
        self._early: dict[int, int] = {}

    def request(self) -> tuple[list[Reply], bool]:
        """Make the next request, and return the answers, and whether this rank waits for one."""
        if self._draw.random() < 0.4:
            chunk = self._draw.randrange(2)
            self._memory[2 * chunk] = self._early[chunk] = self._gradients[chunk] + self._draw.randrange(2)
            return self._server.early(self._rank, self._made, chunk), False
        if not self.left:
            return self._server.meet(self._rank, Purpose.FINISH), True
        self.left -= 1
        present = [self._draw.random() < 0.8 for _ in range(2)]
        follows = [
            there and self._early.get(n) != g for n, (there, g) in enumerate(zip(present, self._gradients, strict=True))
        ]
        for chunk, yes in enumerate(follows):
            if yes:
                self._memory[2 * chunk] = self._gradients[chunk]
        self.pushed.append(tuple(g for g, there in zip(self._gradients, present, strict=True) if there))
        push = Push(self._memory.view(np.uint8), np.array(present), np.array(follows), {}, b"", 1.0)
        self._made += 1
        self._begin()
        return self._server.push(self._rank, self._made - 1, push), True


@pytest.mark.slow
def test_no_update_is_lost_or_applied_twice_in_10000_interleavings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is any applied on a part only, or with a chunk that was sent early and has changed."""
    layout = two_chunks(monkeypatch)
    for seed in range(10_000):
        draw = random.Random(seed)
        mode, part, ranks = draw.choice(list(Mode)), Pair(), range(draw.randint(1, 4))
        server = ParameterServer(part, layout, ranks, [], mode, draw.randint(0, 2), ranks)
        workers = [Speculator(draw, server, rank) for rank in ranks]
        able = set(ranks)
        while able:
            rank = draw.choice(sorted(able))
            replies, waits = workers[rank].request()
            if waits:
                able.remove(rank)
            assert not any(reply.error for reply in replies), seed
            able.update(reply.rank for reply in replies if reply.purpose is Purpose.PUSH)
        assert server.is_over, seed
        assert sorted(part.applied) == sorted(push for worker in workers for push in worker.pushed), seed


def test_a_part_of_a_push_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = two_chunks(monkeypatch)
    memory, both, first = np.zeros(32, np.uint8), np.array([True, True]), np.array([True, False])
    for chunk, number, text in ((0, 0, "without its chunk 1"), (1, 1, "has sent a part of push 1 after 0 pushes")):
        part = Pair()
        server = ParameterServer(part, layout, range(2), [], Mode.ASYNC, None, [4, 7])
        assert server.early(1, number, chunk) == []
        (reply,) = server.push(1, 0, Push(memory, both, first, {}, b"", 1.0))
        assert "rank 7" in reply.error and text in reply.error
        assert part.applied == []
    server = ParameterServer(part, layout, range(2), [], Mode.SYNC, None, [4, 7])
    assert server.push(1, 0, Push(memory, both, both, {}, b"", 1.0)) == []
    (reply,) = server.early(1, 1, 0)
    assert reply.rank == 1 and "before" not in reply.error


def test_how_many_pushes_of_others_a_push_has_missed() -> None:
    server = ParameterServer(Sum(), ONE, range(2), [], Mode.ASYNC, None, range(2))
    missed = [server.push(worker, n, push_of(1))[0].missed for worker, n in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2))]
    assert missed == [0, 0, 2, 0, 2]


def test_a_push_that_was_lost_or_came_twice_is_an_error_for_good() -> None:
    for number in (0, 2):
        server = ParameterServer(Sum(), ONE, range(2), [], Mode.ASYNC, None, [4, 7])
        server.push(1, 0, push_of(1))
        (reply,) = server.push(1, number, push_of(1))
        assert f"rank 7 has sent push {number} after 1 pushes" in reply.error
        assert server.push(0, 0, push_of(1))[0].error == server.meet(1, Purpose.FINISH)[0].error == reply.error
        assert server.applied == 1


def test_those_that_wait_learn_of_an_error() -> None:
    server = ParameterServer(Sum(), ONE, range(3), [3], Mode.SYNC, None, range(4))
    assert server.push(0, 0, push_of(1)) == server.meet(3, Purpose.SERVE) == server.push(1, 0, push_of(1)) == []
    replies = server.push(2, 0, push_of(1, settings=b"other"))
    assert [reply.rank for reply in replies] == [0, 1, 2, 3]
    assert all("different learning rates" in reply.error for reply in replies)


def test_the_mean_is_by_weights_and_over_those_that_train() -> None:
    part = Sum()
    server = ParameterServer(part, ONE, range(3), [], Mode.SYNC, None, range(3))
    server.push(0, 0, push_of(10, weight=3))
    server.push(1, 0, push_of(2, weight=1))
    assert [reply.rank for reply in server.meet(2, Purpose.FINISH)] == [0, 1]  # which frees the others
    assert part.value == 8


class Descent:
    """A part that makes steps of plain gradient descent: float64, shape ``(3,)``."""

    def __init__(self, values: Array, compensation: DelayCompensation) -> None:
        self.values, self._compensation, self._kept = values.copy(), compensation, None

    def step(self, pushes: Sequence[Push]) -> None:
        (push,) = pushes
        gradient = push.gradients.view(np.float64)
        if push.pulled is not None:
            pulled = push.pulled.view(np.float64)
            gradient, self._kept = self._compensation.corrected(gradient, self.values, pulled, self._kept)
        self.values -= float(push.settings) * push.rate * gradient

    def read(self, into: Array) -> None:
        into.view(np.float64)[:] = self.values


COMPENSATIONS = [StalenessRate(), DCASGD(0.3), DCASGD(2.0, mean_square_decay=0.95)]


@pytest.mark.parametrize("compensation", COMPENSATIONS, ids=str)
@given(data=st.data(), staleness=st.none() | st.integers(0, 3), size=st.integers(1, 4))
def test_delay_compensation_is_the_formula(
    compensation: DelayCompensation, data: st.DataObject, staleness: int | None, size: int
) -> None:
    """Workers push, meet, and load other values, in any order. The formulas are written anew here, with copies of their own."""
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    w = generator.normal(size=3)
    part = Descent(w, compensation)
    mode = Mode.ASYNC if staleness is None else Mode.SSP
    server = ParameterServer(
        part, ServerLayout(0, (0,), (0,), 24), range(size), [], mode, staleness, range(size), compensation
    )
    pulled, since, waits, made = [w.copy()] * size, [0] * size, set[int](), [0] * size
    square, applied = np.zeros(3), 0
    for purpose in (Purpose.PULL, Purpose.LOAD, Purpose.FINISH):
        left = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
        met = False
        while not met:
            worker = data.draw(st.sampled_from([worker for worker in range(size) if worker not in waits]))
            waits.add(worker)
            if left[worker]:
                g, lr = generator.normal(size=3), generator.uniform(0.01, 1)
                push = Push(g.copy().view(np.uint8), np.array([True]), np.array([True]), {}, str(lr).encode(), 1.0)
                replies = server.push(worker, made[worker], push)
                left[worker] -= 1
                made[worker] += 1
                tau = applied - since[worker]
                if isinstance(compensation, DCASGD):
                    strength: Any = compensation.strength
                    if (m := compensation.mean_square_decay) is not None:
                        square = m * square + (1 - m) * g**2
                        strength = strength / np.sqrt(square + compensation.epsilon)
                    w = w - lr * (g + strength * g * g * (w - pulled[worker]))
                else:
                    w = w - lr / max(tau, 1) * g
                applied += 1
            else:
                replies = server.meet(worker, purpose)
            for reply in replies:
                assert not reply.error
                waits.remove(reply.rank)
                pulled[reply.rank], since[reply.rank] = w.copy(), applied
                np.testing.assert_allclose(reply.values.view(np.float64), w, rtol=1e-12, atol=1e-12)
                met = reply.purpose is not Purpose.PUSH
        if purpose is Purpose.LOAD:
            w = generator.normal(size=3)
            part.values[:] = w
            pulled = [w.copy()] * size


def test_what_a_compensation_takes() -> None:
    for arguments, text in (
        ({"strength": -1}, "strength=-1: expected 0 or more"),
        ({"strength": float("nan")}, "strength=nan"),
        ({"mean_square_decay": 1.0}, "mean_square_decay=1.0: expected None, or at least 0 and less than 1"),
        ({"epsilon": 0}, "epsilon=0: expected more than 0"),
    ):
        with pytest.raises(ArgumentError, match=text):
            DCASGD(**arguments)


class Sent:
    """Stands in for a `Worker`: notes what is sent early, and whether somebody has waited for it."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, int]] = []
        self.settled = 0

    def send_early(self, server: int, chunk: int) -> None:
        self.chunks.append((server, chunk))

    def settle(self) -> None:
        self.settled += 1


@given(st.lists(st.sampled_from([8, 400_000, 2_000_000]), min_size=1, max_size=9), st.data())
def test_a_chunk_is_sent_once_and_when_it_is_complete(sizes: list[int], data: st.DataObject) -> None:
    layouts, sent = deal(sizes, range(2)), Sent()
    early = EarlyChunks(sent, layouts)  # type: ignore[arg-type]
    members = {
        (server, number): {layout.tensors[place] for place in chunk.places}
        for server, layout in enumerate(layouts)
        for number, chunk in enumerate(layout.chunks)
    }
    ready: set[int] = set()
    for number in data.draw(st.lists(st.sampled_from(range(len(sizes))), max_size=20)):
        assert early.may_copy(number) == (number not in ready)
        if number not in ready:
            ready.add(number)
            early.ready(number)
        assert sorted(sent.chunks) == [chunk for chunk, its in members.items() if its <= ready]
    changed = data.draw(st.sets(st.sampled_from(range(len(sizes))))) & ready
    for number in changed:
        early.change(number)
    known = early.end_step()
    for (server, number), its in members.items():
        assert known[server][number] == (its <= ready and not its & changed)
    failed = any(its <= ready and its & changed for its in members.values())
    assert sent.settled >= failed and early.failed == failed
    assert not any(map(early.has_copy, range(len(sizes)))) and early.may_copy(0) != failed


def test_a_rank_whose_speculation_fails_leaves_it_out_for_longer_and_longer() -> None:
    early, tried = EarlyChunks(Sent(), [ONE]), []  # type: ignore[arg-type]
    for step in range(20):
        if early.may_copy(0):
            tried.append(step)
            early.ready(0)
            if step < 10:
                early.change(0)
        early.end_step()
    assert tried == [0, 2, 5, 10, *range(11, 20)]


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


@given(st.lists(st.sampled_from([0, 1, 40, 300_000, 3_000_000]), min_size=1, max_size=12), st.data())
def test_chunks_have_each_tensor_once(sizes: list[int], data: st.DataObject) -> None:
    for layout in deal(sizes, range(2)):
        assert [place for chunk in layout.chunks for place in chunk.places] == list(range(len(layout.tensors)))
        assert all(len(chunk.places) == 1 or chunk.end - chunk.start <= 1 << 20 for chunk in layout.chunks)
        chosen = data.draw(st.lists(st.booleans(), min_size=len(layout.chunks), max_size=len(layout.chunks)))
        covered = np.zeros(layout.nbytes, int)
        for run in layout.runs(np.array(chosen)):
            assert run.start < run.stop
            covered[run] += 1
        for chunk, yes in zip(layout.chunks, chosen, strict=True):
            assert (covered[chunk.start : chunk.end] == yes).all()


@given(st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=4))
def test_rows_come_back_as_they_were(shapes: dict[int, tuple[int, int]]) -> None:
    rows = {
        key: Rows(np.arange(count) * 3, np.arange(count * nbytes).astype(np.uint8))
        for key, (count, nbytes) in shapes.items()
    }
    found = unpack_rows(pack_rows(rows))
    assert found.keys() == rows.keys()
    for key, (indices, values) in rows.items():
        np.testing.assert_array_equal(found[key].indices, indices)
        np.testing.assert_array_equal(found[key].values, values)


@given(st.integers(0, 2**53), st.floats(0, allow_infinity=False), st.integers(0, 2**31), st.integers(0, 2**31))
def test_messages_come_back_as_they_were(number: int, weight: float, nbytes: int, rows: int) -> None:
    request = WorkerRequest(Purpose.PUSH, number, rows, nbytes, rows, weight)
    assert WorkerRequest.unpack(request.pack()) == request
    answer = ServerAnswer(Purpose.LOAD, nbytes, number)
    assert ServerAnswer.unpack(answer.pack()) == answer


@given(st.lists(st.integers(0, 8), min_size=2, max_size=5), st.sampled_from(Mode), st.integers(0, 3), st.data())
def test_nobody_waits_for_workers_that_are_lost(
    steps: list[int], mode: Mode, staleness: int, data: st.DataObject
) -> None:
    """Workers are lost at any moment. The others come to their end, and no push is lost or applied twice."""
    run = Run(mode, staleness, steps)
    lost: set[int] = set()
    while able := [worker for worker in run.able() if worker not in lost]:
        living = [worker for worker in run.workers if worker not in lost]
        if len(living) > 1 and data.draw(st.integers(0, 5)) == 0:
            gone = data.draw(st.sampled_from(living))
            lost.add(gone)
            run.take(run.server.lose(gone))
        else:
            run.request(data.draw(st.sampled_from(able)))
        assert not lost & set(run.over) or run.server.is_over
        assert run.server.is_over or [worker for worker in run.able() if worker not in lost], "nobody can go on"
    assert run.server.is_over
    assert set(run.over) >= set(run.workers) - lost
    applied = sorted(number for numbers in run.part.steps for number in numbers)
    made = sorted(1000 * worker + n for worker in run.workers for n in range(run.made[worker]))
    if mode is Mode.SYNC:  # a push that has waited for others is gone with its worker
        assert len(set(applied)) == len(applied)
        assert {n for n in made if n // 1000 not in lost} <= set(applied) <= set(made)
    else:
        assert applied == made
