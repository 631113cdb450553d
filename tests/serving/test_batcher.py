"""The batcher through random interleavings of arrivals, answers, errors, losses and time; and its rules one by one."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hvdlite.errors import ArgumentError
from hvdlite.serving.batcher import Answer, Batch, Batcher, Outcome, QueueFullError, Reason, Request
from hvdlite.serving.waiting import FixedWait

WAIT = 0.5


class Recorder(FixedWait):
    """A fixed wait that remembers what it was told."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.arrivals: list[float] = []
        self.services: list[tuple[float, int, float]] = []

    def arrived(self, time: float, here: int, key: Hashable) -> None:
        self.arrivals.append(time)

    def served(self, time: float, batch_size: int, seconds: float) -> None:
        self.services.append((time, batch_size, seconds))


def request(key: Hashable = "a", arrived: float = 0.0, deadline: float = math.inf, payload: object = None) -> Request:
    return Request(key, arrived, deadline, payload)


class Interleavings(RuleBasedStateMachine):
    """Random events. The model knows which requests came, and what became of each."""

    @initialize(max_batch=st.integers(1, 5), max_queue=st.integers(1, 12), wait=st.sampled_from([0.0, WAIT]))
    def begin(self, max_batch: int, max_queue: int, wait: float) -> None:
        self.max_batch, self.max_queue, self.wait = max_batch, max_queue, wait
        self.batcher = Batcher(max_batch, max_queue, Recorder(wait))
        self.now, self.look_again = 0.0, math.inf
        self.taken: list[Request] = []
        self.answers: dict[Request, Answer] = {}
        self.computed: Counter[Request] = Counter()
        self.idle: set[int] = set()
        self.busy: dict[int, Batch] = {}
        self.replicas = 0
        self.losses: Counter[Request] = Counter()
        self.order: dict[Hashable, deque[Request]] = {}
        """For each key, what waits and was never sent, in the order of arrival."""

    @rule(key=st.sampled_from("ab"), is_bad=st.booleans(), time=st.sampled_from([0.3, 2.0, math.inf]))
    def arrive(self, key: str, is_bad: bool, time: float) -> None:
        new = request(key, self.now, self.now + time, payload=is_bad)
        waiting = len(self.taken) - len(self.answers) - sum(len(batch.requests) for batch in self.busy.values())
        assert self.batcher.waiting == waiting
        assert self.batcher.is_full == (waiting >= self.max_queue)
        if self.batcher.is_full:
            with pytest.raises(QueueFullError):
                self.batcher.add(new)
        else:
            self.batcher.add(new)
            self.taken.append(new)
            self.order.setdefault(key, deque()).append(new)
        self.step()

    @rule(seconds=st.sampled_from([0.1, 0.4, 1.0]))
    def time_passes(self, seconds: float) -> None:
        """The caller looks again when it was told to, so time goes in such steps."""
        end = self.now + seconds
        while self.look_again <= end:
            self.now = max(self.now, self.look_again)
            self.step()
            assert self.look_again > self.now, "the caller would look again for ever"
        self.now = end
        self.step()

    @precondition(lambda self: len(self.idle) + len(self.busy) < 3)
    @rule()
    def replica_joins(self) -> None:
        self.replicas += 1
        self.idle.add(self.replicas)
        self.batcher.joined(self.replicas)
        self.step()

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def replica_answers(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.busy)))
        batch = self.busy.pop(replica)
        self.idle.add(replica)
        if any(each.payload for each in batch.requests):
            self.over(self.batcher.raised(replica, "bad"))
        else:
            self.over(self.batcher.done(replica, [id(each) for each in batch.requests], self.now))
        self.step()

    @precondition(lambda self: self.idle or self.busy)
    @rule(data=st.data())
    def replica_is_lost(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted({*self.idle, *self.busy})))
        self.idle.discard(replica)
        if replica in self.busy:
            self.losses.update(self.busy.pop(replica).requests)
        self.over(self.batcher.lost(replica))
        self.step()

    def step(self) -> None:
        actions = self.batcher.step(self.now)
        self.look_again = actions.look_again
        self.over(actions.answers)
        for replica, batch in actions.send:
            assert replica in self.idle
            self.idle.remove(replica)
            self.busy[replica] = batch
            assert 1 <= len(batch.requests) <= self.max_batch
            assert len({each.key for each in batch.requests}) == 1
            for each in batch.requests:
                assert each not in self.answers and each.deadline > self.now
                if batch.again is None:
                    waits = self.order[each.key]
                    while waits[0] in self.answers:  # it was too late
                        waits.popleft()
                    assert waits.popleft() is each, "the order of arrival is kept"
                self.computed[each] += 1
        if self.idle:  # then nothing waits that is due
            waiting = Counter(each.key for each in self.waiting())
            for each in self.waiting():
                assert self.computed[each] == 0, "what is tried again does not wait for others"
                assert self.now < each.arrived + self.wait, "the oldest waits no longer than the time-out"
                assert waiting[each.key] < self.max_batch, "a full batch goes"
                assert self.look_again <= each.arrived + self.wait

    def over(self, answers: list[Answer]) -> None:
        for answer in answers:
            each = answer.request
            assert each not in self.answers, "answered twice"
            self.answers[each] = answer
            if answer.outcome is Outcome.DONE:
                assert answer.output == id(each) and not each.payload
            elif answer.outcome is Outcome.FAILED:
                assert each.payload and answer.output == "bad"
            elif answer.outcome is Outcome.EXPIRED:
                assert each.deadline <= self.now
            else:
                assert self.losses[each] == 2

    def waiting(self) -> list[Request]:
        busy = {each for batch in self.busy.values() for each in batch.requests}
        return [each for each in self.taken if each not in self.answers and each not in busy]

    @invariant()
    def nobody_waits_past_the_deadline(self) -> None:
        assert all(each.deadline > self.now for each in self.waiting())

    @invariant()
    def numbers_are_right(self) -> None:
        assert self.batcher.computing == sum(len(batch.requests) for batch in self.busy.values())
        assert self.batcher.waiting == len(self.waiting())

    def teardown(self) -> None:
        """With a replica and time, everything is answered once, and computed no more often than halving and a retry explain."""
        if not hasattr(self, "batcher"):
            return
        self.replicas += 1
        self.idle.add(self.replicas)
        self.batcher.joined(self.replicas)
        self.step()
        for _ in range(10 * len(self.taken) + 10):
            for replica in list(self.busy):
                batch = self.busy.pop(replica)
                self.idle.add(replica)
                if any(each.payload for each in batch.requests):
                    self.over(self.batcher.raised(replica, "bad"))
                else:
                    self.over(self.batcher.done(replica, [id(each) for each in batch.requests], self.now))
            self.step()
            if not self.busy and self.look_again < math.inf:
                self.now = max(self.now, self.look_again)
                self.step()
        assert len(self.answers) == len(self.taken) and self.batcher.waiting == 0
        parts = max(self.max_batch, 3) + 2
        assert all(times <= 1 + parts + 1 + self.losses[each] for each, times in self.computed.items())
        if not any(each.payload for each in self.taken):
            assert all(times <= 1 + self.losses[each] for each, times in self.computed.items())


Interleavings.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
test_interleavings = Interleavings.TestCase


def test_a_batch_goes_when_it_is_full_or_its_time_is_up() -> None:
    batcher = Batcher(3, 10, Recorder(0.5))
    batcher.joined(7)
    batcher.add(request(arrived=1.0))
    batcher.add(request("b", arrived=1.2))
    assert batcher.step(1.2).send == []
    assert batcher.step(1.2).look_again == 1.5
    batcher.add(request("b", arrived=1.3))
    batcher.add(request("b", arrived=1.3))
    ((replica, batch),) = batcher.step(1.3).send
    assert replica == 7 and [each.key for each in batch.requests] == ["b"] * 3
    assert batcher.step(1.6).send == []  # due, but no replica is idle
    batcher.done(7, [0, 1, 2], 1.8)
    ((_, batch),) = batcher.step(1.8).send
    assert [each.key for each in batch.requests] == ["a"]


def test_a_deadline_ends_the_wait_when_half_of_its_time_is_gone() -> None:
    batcher = Batcher(3, 10, FixedWait(5.0))
    batcher.joined(0)
    batcher.add(request(arrived=1.0))
    batcher.add(request(arrived=2.0, deadline=4.0))
    assert batcher.step(2.0).look_again == 3.0
    ((_, batch),) = batcher.step(3.0).send
    assert len(batch.requests) == 2


def test_the_chooser_learns_of_first_tries_only() -> None:
    chooser = Recorder(0.0)
    batcher = Batcher(4, 10, chooser)
    for at in (1.0, 2.0):
        batcher.add(request(arrived=at))
    batcher.joined(0)
    assert batcher.step(3.0).send
    assert batcher.raised(0, "no") == []
    for now in (5.0, 6.0):
        ((_, batch),) = batcher.step(now).send
        assert batch.again is Reason.RAISED
        batcher.done(0, [0], now)
    batcher.add(request(arrived=7.0))
    assert batcher.step(8.0).send
    batcher.done(0, [0], 8.25)
    assert chooser.arrivals == [1.0, 2.0, 7.0]
    assert chooser.services == [(8.25, 1, 0.25)]


def parts_until_all_are_answered(count: int, bad: set[int], replicas: int = 1) -> tuple[int, int]:
    """How many batches one batch needs, and how many until the last request is answered that does not raise."""
    batcher = Batcher(count, count, FixedWait(0.0))
    for number in range(count):
        batcher.add(request(payload=number))
    for replica in range(replicas):
        batcher.joined(replica)
    answers: dict[int, Outcome] = {}
    batches = last = 0
    computing: deque[tuple[int, Batch]] = deque()
    while True:
        computing += batcher.step(1.0).send
        if not computing:
            break
        replica, batch = computing.popleft()
        batches += 1
        numbers = [each.payload for each in batch.requests]
        found = batcher.raised(replica, "no") if bad & {*numbers} else batcher.done(replica, numbers, 1.0)
        if any(answer.outcome is Outcome.DONE for answer in found):
            last = batches
        answers |= {answer.request.payload: answer.outcome for answer in found}
    assert answers == {number: Outcome.FAILED if number in bad else Outcome.DONE for number in range(count)}
    return batches, last


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("bad", range(32))
def test_one_that_raises_is_found_by_seven_parts(bad: int, replicas: int) -> None:
    batches, last = parts_until_all_are_answered(32, {bad}, replicas)
    assert replicas > 1 or (batches <= 1 + 7 and last <= 1 + 6)


@given(data=st.data(), count=st.integers(2, 40), replicas=st.integers(1, 3))
def test_the_parts_are_no_more_than_is_proved(data: st.DataObject, count: int, replicas: int) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    batches, _ = parts_until_all_are_answered(count, bad, replicas)
    steps = math.ceil(math.log2(count))
    budget = max(count, steps + 2)
    if replicas == 1:
        proved = len(bad) * (steps + 2)
        assert batches <= 1 + (proved if proved <= budget else budget + count)


def test_new_requests_take_turns_with_those_that_are_tried_again() -> None:
    batcher = Batcher(32, 100, FixedWait(0.0))
    batcher.joined(0)
    for number in range(32):
        batcher.add(request(payload=number))
    orders = []
    for _ in range(6):
        ((_, batch),) = batcher.step(1.0).send
        orders.append(batch.again)
        batcher.raised(0, "no") if 0 in [each.payload for each in batch.requests] else batcher.done(
            0, batch.requests, 1.0
        )
        batcher.add(request("other", payload=-1))
    assert orders == [None, Reason.RAISED, None, Reason.RAISED, None, Reason.RAISED]


def test_a_request_that_nobody_waits_for_is_computed_no_more() -> None:
    batcher = Batcher(4, 10, FixedWait(0.0))
    requests = [request(payload=number) for number in range(5)]
    for each in requests:
        batcher.add(each)
    batcher.joined(0)
    assert batcher.step(1.0).send
    for number in (1, 4):  # one is computed, one waits
        batcher.cancel(requests[number])
    assert batcher.waiting == 0
    assert batcher.raised(0, "no") == []
    computed = []
    while send := batcher.step(1.0).send:
        computed += [each.payload for each in send[0][1].requests]
        batcher.done(0, send[0][1].requests, 1.0)
    assert sorted(computed) == [0, 2, 3] and batcher.waiting == 0


def test_an_error_that_no_request_caused_ends_them_all() -> None:
    batcher = Batcher(8, 10, FixedWait(0.0))
    for _ in range(3):
        batcher.add(request())
    batcher.joined(0)
    batcher.step(0.0)
    assert [answer.outcome for answer in batcher.raised(0, "2 outputs", blame=False)] == [Outcome.SPOILED] * 3


def test_rows_of_one_request_are_not_computed_in_vain() -> None:
    """If a batch of nothing else raises, none is; in a batch with others, the other rows wait until the bad one is found."""
    batcher = Batcher(8, 20, FixedWait(0.0))
    for number in range(4):
        batcher.add(Request("a", 0.0, math.inf, number, group="rows"))
    batcher.joined(0)
    batcher.step(0.0)
    assert [answer.outcome for answer in batcher.raised(0, "no")] == [Outcome.SPOILED] * 4
    rows = [Request("a", 0.0, math.inf, number, group="rows") for number in range(4)]
    for each in (*rows, *(request(payload=number) for number in range(4, 8))):
        batcher.add(each)
    answers: list[Answer] = []
    batches = 0
    while send := batcher.step(0.0).send:
        batches += 1
        numbers = [each.payload for each in send[0][1].requests]
        answers += batcher.raised(0, "no") if 1 in numbers else batcher.done(0, numbers, 0.0)
    found = {answer.request.payload: answer.outcome for answer in answers}
    assert found == dict.fromkeys(range(4), Outcome.SPOILED) | dict.fromkeys(range(4, 8), Outcome.DONE)
    assert batches == 3 and batcher.waiting == 0  # all, the rows, the others


@pytest.mark.parametrize("blame", [False, True])
def test_a_request_that_was_alone_and_is_to_blame_costs_one_replica(blame: bool) -> None:
    batcher = Batcher(4, 10, FixedWait(0.0))
    batcher.add(request(payload=1))
    batcher.joined(0)
    batcher.step(0.0)
    answers = batcher.lost(0, blame=blame)
    assert [answer.outcome for answer in answers] == [Outcome.LOST] * blame
    assert batcher.waiting == (not blame)


def test_a_request_that_kills_replicas_takes_no_other_with_it() -> None:
    batcher = Batcher(4, 10, FixedWait(0.0))
    for number in range(4):
        batcher.add(request(payload=number))
    answers: list[Answer] = []
    for replica in range(10):
        batcher.joined(replica)
        while send := batcher.step(1.0).send:
            numbers = [each.payload for each in send[0][1].requests]
            if 2 in numbers:
                answers += batcher.lost(replica)
                break
            answers += batcher.done(replica, numbers, 1.0)
    assert {answer.request.payload: answer.outcome for answer in answers} == {
        number: Outcome.LOST if number == 2 else Outcome.DONE for number in range(4)
    }


def test_nothing_waits_for_others_when_the_server_drains() -> None:
    batcher = Batcher(4, 10, FixedWait(math.inf))
    batcher.joined(0)
    batcher.add(request())
    assert batcher.step(9.0).send == [] and batcher.step(9.0).look_again == math.inf
    batcher.drain()
    assert len(batcher.step(9.0).send) == 1


def test_what_is_over_takes_no_memory() -> None:
    batcher = Batcher(4, 10, FixedWait(0.0))
    batcher.joined(0)
    for number in range(1000):
        batcher.add(request(arrived=float(number), deadline=number + 1e6))
        batcher.step(float(number))
        batcher.done(0, [0], float(number))
    assert len(batcher._deadlines) < 100


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_a_wait_is_no_negative_time(seconds: float) -> None:
    with pytest.raises(ArgumentError, match="expected 0 or more"):
        FixedWait(seconds)
