"""Ranks that wait for each other, each for something that no one controller sees."""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdlite as hvd
from hvdlite.api import in_world, world
from hvdlite.config import Config
from hvdlite.errors import HvdliteError, MismatchError
from hvdlite.protocols import TensorInfo
from hvdlite.ranks.topology import Members
from hvdlite.testing import on_ranks
from hvdlite.watchdog.deadlock import DeadlockDetector, Need, Needs

FAST = Config(deadlock_time_seconds=0.3)


def standoff(size: int, check: Callable[[], None]) -> str:
    """What a job raises in which all ranks would wait for ever."""
    with pytest.raises(HvdliteError) as caught:
        on_ranks(size, check, config=FAST, timeout=30)
    return f"{caught.value} {caught.value.__cause__}"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", ["an operation", "join"])
def test_a_gradient_exchange_and_another_wait(size: int, what: str) -> None:
    def check() -> None:
        reducer = world().group().reducers.make([TensorInfo("float32", (4,))])
        reducer.exchange([True])
        try:
            if hvd.rank() == 0:
                reducer.exchange([True])
            elif hvd.rank() == 1:
                hvd.allreduce(np.ones(3), name="loss") if what == "an operation" else hvd.join()
            else:
                assert over.wait(20)  # it computes; whatever it does then, it cannot help
        finally:
            over.set()

    over = threading.Event()
    text = standoff(size, check)
    assert "two ranks wait for each other, so neither can go on:" in text
    assert "rank 0 waits for gradient exchange 2" in text
    awaited = {"join": "join()", "an operation": "'loss': allreduce(float64(3), op=average)"}
    assert f"rank 1 waits for {awaited[what]}" in text


def test_operations_of_two_process_sets() -> None:
    def check() -> None:
        lower = hvd.add_process_set([0, 1])
        if hvd.rank() == 0:
            hvd.barrier("in the set", process_set=lower)
        elif hvd.rank() == 1:
            hvd.barrier("of all")

    text = standoff(3, check)
    assert "rank 0 waits for 'in the set': barrier()\n  rank 1 waits for 'of all': barrier()" in text


def test_messages_that_wait_for_each_other() -> None:
    def check() -> None:
        channel = world().group().channel("a test")
        if hvd.rank() < 2:
            channel.isend(np.ones(1), 1 - hvd.rank()).wait()
            for _ in range(2):  # the second message was not sent
                channel.irecv(np.zeros(1), 1 - hvd.rank()).wait()

    text = standoff(3, check)
    assert (
        "two ranks wait for each other, so neither can go on:\n  rank 0 waits for a message with tag 0 from rank 1"
        in text
    )


def test_a_message_and_an_operation_wait_for_each_other() -> None:
    def check() -> None:
        channel = world().group().channel("a test")
        if hvd.rank() == 1:
            channel.irecv(np.zeros(1), 0).wait()
        else:
            hvd.barrier("the end")

    text = standoff(3, check)
    assert "  rank 0 waits for 'the end': barrier()\n  rank 1 waits for a message with tag 0 from rank 0" in text


@pytest.mark.parametrize("size", [3, 4, 5])
def test_a_circle_over_process_sets(size: int) -> None:
    """Each rank waits for the next one, in a set of the two; the last for the first."""
    texts = []

    def check() -> None:
        pairs = [(rank, (rank + 1) % size) for rank in range(size)]
        sets = [hvd.add_process_set(sorted(pair)) for pair in pairs]
        try:
            hvd.barrier(f"from {hvd.rank()}", process_set=sets[hvd.rank()])
        except MismatchError as error:
            texts.append(str(error))

    on_ranks(size, check, config=FAST, timeout=30)
    lines = [f"  rank {rank} waits for 'from {rank}': barrier()" for rank in range(size)]
    first = f"{size} ranks wait for each other in a circle, each for the next, so none can go on:"
    assert texts == ["\n".join([first, *lines])] * size


def test_a_rank_that_waits_for_a_pair_is_told_too() -> None:
    some, everybody, others = Members(1, (0, 1)), Members(0, (0, 1, 2)), Members(2, (1, 2))
    needs = [Need(some, "a", 1, "'a'"), Need(everybody, None, 1, "gradients"), Need(others, "b", 1, "'b'")]
    messages: dict[int, deque[Any]] = {rank: deque() for rank in range(3)}

    def detector(rank: int) -> DeadlockDetector:
        def post(to: int, *message: Any) -> None:
            messages[to].append((rank, *message))

        return DeadlockDetector(rank, post, lambda need: need is not needs[rank])

    detectors = [detector(rank) for rank in range(3)]
    told: dict[int, str] = {}
    for _ in range(8):
        for rank, each in enumerate(detectors):
            while messages[rank]:
                each.receive(*messages[rank].popleft())
            if (text := each.look((needs[rank],))) is not None:
                assert rank not in told, "it is told once"
                told[rank] = text
    pair = "two ranks wait for each other, so neither can go on:\n  rank 0 waits for 'a'\n  rank 1 waits for gradients"
    assert told == {0: pair, 1: pair, 2: f"{pair}\nSo rank 2 cannot go on either, which waits for 'b'."}


def test_removing_a_set_that_a_rank_of_it_has_joined() -> None:
    def check() -> None:
        lower = hvd.add_process_set([0, 1])
        if hvd.rank() == 0:
            hvd.join(lower)
        else:
            hvd.remove_process_set(lower)

    text = standoff(3, check)
    assert "rank 0 waits for join()" in text
    assert "rank 1 waits for unnamed operation 1: remove_process_set(ranks=(0, 1))" in text


def wait_for_reports(patience: int) -> None:
    """Let this rank's watch look so many times while the other ranks wait: by its own looks, not by the clock."""
    watch, looks = world().watch, threading.Semaphore(0)
    read = watch._read_messages

    def counted() -> None:
        read()
        looks.release()

    watch._read_messages = counted  # type: ignore[method-assign]
    for _ in range(patience):
        assert looks.acquire(timeout=20)
    watch._read_messages = read  # type: ignore[method-assign]


def test_what_is_in_flight_is_no_standoff() -> None:
    """Rank 0 waits for rank 1 and rank 1 for rank 0, which has done its part; a third is late."""

    def check() -> None:
        reducer = world().group().reducers.make([TensorInfo("float32", (4,))])
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(np.ones(3), hvd.Sum, "loss")
            reducer.exchange([True])
            assert handle.wait().tolist() == [3.0] * 3
        else:
            if hvd.rank() == 2:
                wait_for_reports(6)
            assert hvd.allreduce(np.ones(3), hvd.Sum, "loss").tolist() == [3.0] * 3
            reducer.exchange([True])

    on_ranks(3, check, config=FAST, timeout=40)


def test_what_a_known_thread_will_do_is_no_standoff() -> None:
    """The main threads wait for each other; another thread of rank 0 does what rank 1 waits for."""

    def check() -> None:
        here = world()
        reducer = here.group().reducers.make([TensorInfo("float32", (4,))])
        if hvd.rank() == 0:
            thread = threading.Thread(target=submit_later, args=(here,))
            thread.start()
            assert known.wait(20)
            reducer.exchange([True])
            thread.join(20)
            assert not thread.is_alive()
        else:
            hvd.barrier("known")
            hvd.barrier("later")
            reducer.exchange([True])

    known = threading.Event()

    def submit_later(here: Any) -> None:
        with in_world(here):
            handle = hvd.barrier_async("known")
            known.set()
            handle.wait()
            wait_for_reports(8)  # the other rank waits for what comes next
            hvd.barrier("later")

    on_ranks(2, check, config=FAST, timeout=40)


def test_ranks_that_wait_for_a_late_one_are_left_alone() -> None:
    """Each rank waits for a third one in its own set, or in the exchange of gradients."""

    def check() -> None:
        left, right = hvd.add_process_set([0, 2]), hvd.add_process_set([1, 2])
        reducer = world().group().reducers.make([TensorInfo("float32", (4,))])
        if hvd.rank() < 2:
            hvd.barrier("a", process_set=left if hvd.rank() == 0 else right)
        else:
            wait_for_reports(6)
            hvd.barrier("a", process_set=right)
            hvd.barrier("a", process_set=left)
        if hvd.rank() == 2:
            wait_for_reports(6)
        reducer.exchange([True])

    on_ranks(3, check, config=FAST, timeout=40)


# The protocol alone, with ranks that are stuck and wake in all orders


class Rank:
    """A rank whose program is a list of groups, to be met in by turns. It may announce meetings before it waits for them."""

    def __init__(self, rank: int, program: list[Members], letters: dict[int, deque[Any]], draw: random.Random) -> None:
        self.rank, self.program, self.position, self.draw = rank, program, -1, draw
        self.announced: Counter[Members] = Counter()
        self.standoff = DeadlockDetector(rank, lambda dest, *letter: letters[dest].append((rank, *letter)), self.lacks)
        self.go_on()

    def lacks(self, need: Need) -> bool:
        return self.announced[need.members] < need.number

    def needs(self) -> Needs:
        if self.position == len(self.program):
            return ()
        group = self.program[self.position]
        number = self.program[: self.position + 1].count(group)
        return (Need(group, None, number, f"meeting {number} of {group}"),)

    def announce(self) -> None:
        """Another thread of this rank announces what the first one will wait for later."""
        for early in self.draw.sample(self.program, self.draw.randrange(len(self.program) + 1)):
            self.announced[early] = min(self.announced[early] + self.draw.randrange(2), self.program.count(early))

    def go_on(self) -> None:
        self.position += 1
        self.announce()
        for need in self.needs():
            self.announced[need.members] = max(self.announced[need.members], need.number)


@given(st.integers(2, 5), st.data(), st.integers(0, 2**32))
def test_all_ranks_are_told_that_wait_in_a_circle_and_no_others(size: int, data: st.DataObject, seed: int) -> None:
    draw = random.Random(seed)
    some_ranks = st.sets(st.integers(0, size - 1), min_size=2).map(lambda ranks: tuple(sorted(ranks)))
    drawn = data.draw(st.lists(st.tuples(st.integers(0, 1), some_ranks), max_size=6))  # two groups may have equal ranks
    groups = [Members(drawn.index(each), each[1]) for each in drawn]
    programs = [[group for group in groups if rank in group.ranks] for rank in range(size)]
    if data.draw(st.booleans()):  # an error in one of them
        draw.shuffle(programs[data.draw(st.integers(0, size - 1))])
    letters: dict[int, deque[Any]] = {rank: deque() for rank in range(size)}
    ranks = [Rank(rank, program, letters, draw) for rank, program in enumerate(programs)]

    def go_on(rank: Rank) -> bool:
        """Let a rank see that what it waits for is there, if it is."""
        for need in rank.needs():
            if all(not ranks[each].lacks(need) for each in need.members.ranks):
                rank.go_on()
                return True
        return False

    told: dict[int, str] = {}
    for _ in range(400):
        choice = draw.random()
        rank = draw.choice(ranks)
        if choice < 0.1:
            go_on(rank)
        elif choice < 0.5 and letters[rank.rank]:
            rank.standoff.receive(*letters[rank.rank].popleft())
        elif choice < 0.6:  # it is not stuck, for another thread of it works
            assert rank.standoff.look(()) is None
            rank.announce()
        # A rank may be seen as stuck at any moment at which it waits.
        elif (text := rank.standoff.look(rank.needs())) is not None:
            told[rank.rank] = text
    while any([go_on(rank) for rank in ranks]):
        pass
    for number, text in told.items():
        assert ranks[number].needs(), f"rank {number} came to its end, and was told: {text}"
        assert ranks[number].needs()[0].text in text
    for _ in range(30):
        for rank in ranks:
            while letters[rank.rank]:
                rank.standoff.receive(*letters[rank.rank].popleft())
            if (text := rank.standoff.look(rank.needs())) is not None:
                told[rank.rank] = text
    # Nobody comes any more who could help: what a rank waits for, another one that is stuck elsewhere has not done.
    deadlocked = {rank.rank for rank in ranks if rank.needs()}
    while True:
        helped = {
            rank
            for rank in deadlocked
            if not any(
                ranks[other].lacks(need) and ranks[other].needs()[0].members != need.members
                for need in ranks[rank].needs()
                for other in deadlocked & set(need.members.ranks)
            )
        }
        if not helped:
            break
        deadlocked -= helped
    assert set(told) == deadlocked
