"""Ballots under chosen interleavings: a rank may be stopped, or interrupted by an error, at every access to shared memory."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.comm.ballot import Ballot, What
from hvdlite.protocols import Array

LIMIT = 60


class Fault(BaseException):
    """As an error of a signal handler."""


class Schedule:
    """Lets one thread run at a time. Which one goes on is drawn anew at every access to shared memory.

    Args:
        ranks: The number of ranks, each of which is a thread.
        seed: The same seed gives the same interleaving.
        faults: The chance that an access raises `Fault`, while this is allowed.
    """

    def __init__(self, ranks: int, seed: int, faults: float) -> None:
        self._rng, self._faults = random.Random(seed), faults
        self._turns = [threading.Semaphore(0) for _ in range(ranks)]
        self._live = list(range(ranks))
        self.may_fail = [False] * ranks

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Return what `work` returns for each rank."""
        results: list[Any] = [None] * len(self._turns)
        errors: list[BaseException] = []

        def rank(number: int) -> None:
            assert self._turns[number].acquire(timeout=LIMIT)
            try:
                results[number] = work(number)
            except BaseException as error:
                errors.append(error)
            self._live.remove(number)
            if self._live:
                self._turns[self._rng.choice(self._live)].release()

        threads = [threading.Thread(target=rank, args=[number], daemon=True) for number in range(len(self._turns))]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join(LIMIT)
        if errors:
            raise errors[0]
        assert not self._live
        return results

    def point(self, rank: int) -> None:
        """Let another rank go on, or this one."""
        chosen = self._rng.choice(self._live)
        if chosen != rank:
            self._turns[chosen].release()
            assert self._turns[rank].acquire(timeout=LIMIT)
        if self.may_fail[rank] and self._rng.random() < self._faults:
            raise Fault


class Line:
    """A rank's numbers, as one rank sees them."""

    def __init__(self, schedule: Schedule, rank: int, numbers: list[int]) -> None:
        self._schedule, self._rank, self._numbers = schedule, rank, numbers

    def __getitem__(self, index: int) -> int:
        self._schedule.point(self._rank)
        return self._numbers[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._schedule.point(self._rank)
        self._numbers[index] = value


class Waits:
    """Waits of one rank, without a clock."""

    def __init__(self, rank: int, memory: list[Array], looks: int) -> None:
        self.rank, self._memory, self._looks = rank, memory, looks

    def allocate(self, nbytes: int) -> list[Array]:
        return self._memory

    def wait_briefly(self, done: Callable[[], bool], until: float) -> bool:
        return any(done() for _ in range(self._looks))

    def wait_until(self, done: Callable[[], bool]) -> None:
        while not done():
            pass


def vote(wanted: list[list[int]], seed: int, faults: float = 0.0, looks: int = 20) -> list[list[tuple[int, Any]]]:
    """Return for each rank and each thing that it wants: the turn, and what it has read then; None if they did not agree."""
    size = len(wanted)
    schedule = Schedule(size, seed, faults)
    memory = [np.zeros(2**14, np.uint8) for _ in wanted]
    lines = [[0] * 8 for _ in wanted]

    def work(rank: int) -> list[tuple[int, Any]]:
        ballot = Ballot(Waits(rank, memory, looks), 1.0, contextlib.nullcontext())  # type: ignore[arg-type]
        mine, *others = [Line(schedule, rank, lines[(rank + n) % size]) for n in range(size)]
        ballot._mine, ballot._others = mine, others  # type: ignore[assignment]
        outcomes: list[tuple[int, Any]] = []
        for index, each in enumerate(wanted[rank]):
            what: What = 0, each, -1
            before, data = lines[rank][0], np.array([rank, index])
            try:
                schedule.may_fail[rank] = True
                shown = ballot.agree(what, data)
                schedule.may_fail[rank] = False
            except Fault:
                schedule.may_fail[rank] = False
                agreed: bool | None = None if lines[rank][0] != before else False
                while agreed is None:
                    agreed = ballot.settle()
                outcomes.append((ballot.turn, "agreed" if agreed else None))
                continue
            for _ in range(20):  # the others go on, and must not overwrite what this rank reads
                schedule.point(rank)
            outcomes.append((ballot.turn, shown and [piece.tolist() for piece in shown]))
        return outcomes

    return schedule.run(work)


def check(wanted: list[list[int]], outcomes: list[list[tuple[int, Any]]]) -> int:
    """Check that all ranks have come to the same end in every turn. Return the number of agreements."""
    agreed: dict[int, dict[int, tuple[int, Any]]] = {}
    for rank, those in enumerate(outcomes):
        for index, (turn, read) in enumerate(those):
            if read is not None:
                assert rank not in agreed.setdefault(turn, {})
                agreed[turn][rank] = index, read
    for turn, by_rank in agreed.items():
        assert len(by_rank) == len(wanted), f"turn {turn}: agreed on {sorted(by_rank)} only"
        assert len({wanted[rank][index] for rank, (index, _) in by_rank.items()}) == 1
        expected = [[rank, by_rank[rank][0]] for rank in range(len(wanted))]
        for _, read in by_rank.values():
            assert read in ("agreed", expected)
    return len(agreed)


SAME = st.integers(1, 6).map(lambda count: list(range(count)))
SEEDS = st.integers(0, 2**32)


@given(st.integers(2, 4), SEEDS, st.integers(1, 4))
def test_all_ranks_come_to_the_same_end(size: int, seed: int, looks: int) -> None:
    rng = random.Random(seed)
    wanted = [[rng.choice([index, index, index, 7]) for index in range(8)] for _ in range(size)]
    check(wanted, vote(wanted, seed, looks=looks))


@given(st.integers(2, 3), SEEDS)
def test_an_error_at_any_moment_leaves_the_same_end(size: int, seed: int) -> None:
    wanted = [list(range(6))] * size
    check(wanted, vote(wanted, seed, faults=0.03))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_that_want_the_same_agree(size: int) -> None:
    wanted = [list(range(30))] * size
    assert check(wanted, vote(wanted, 1, looks=10_000)) == 30


def test_a_rank_that_comes_late_does_not_wait() -> None:
    """Rank 0 has withdrawn; when rank 1 wants the same, it sees that, and both go on with the next turn."""
    memory = [np.zeros(2**14, np.uint8) for _ in range(2)]
    first, second = (Ballot(Waits(rank, memory, 3), 1.0, contextlib.nullcontext()) for rank in range(2))  # type: ignore[arg-type]
    assert first.agree((0, 5, 0), np.ones(1)) is None
    second._host.wait_briefly = lambda *_: pytest.fail("it waits")  # type: ignore[method-assign]
    assert second.agree((0, 5, 0), np.ones(1)) is None
    assert (first.turn, second.turn) == (1, 1)
