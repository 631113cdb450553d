"""Agreement in the tree, letter by letter, without an engine: many ranks, small fan-outs, any order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.comm.local import LocalFabric
from hvdlite.errors import ranks_text
from hvdlite.operations import Milestone, Signature
from hvdlite.operations.negotiation.controller import CACHE_ENTRIES, FANOUT, Controller
from hvdlite.operations.negotiation.messages import Decision, Key


def signature(value: str) -> Signature:
    return ("allreduce", ((value, (1,)),), ())


def controllers(
    size: int, fanout: int, together: int = 1000, cache_entries: int = CACHE_ENTRIES
) -> tuple[LocalFabric, list[Controller]]:
    def fuse(keys: Sequence[Key]) -> list[Sequence[Key]]:
        return [keys[start : start + together] for start in range(0, len(keys), together)]

    fabric = LocalFabric(size)
    return fabric, [Controller(transport, fuse, fanout, cache_entries) for transport in fabric.transports]


def settle(fabric: LocalFabric, ranks: list[Controller], log: list[list[Decision]], draw: random.Random) -> None:
    """Step the ranks in random order until none of them has sent a letter or decided anything."""

    def state() -> list[int]:
        return [fabric.traffic(rank).control_messages + len(log[rank]) for rank in range(len(ranks))]

    before = None
    while before != (before := state()):
        for rank in draw.sample(range(len(ranks)), len(ranks)):
            log[rank] += ranks[rank].step()


@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 30), st.integers(1, 7), st.randoms())
def test_all_ranks_decide_the_same_in_the_same_order(
    size: int, fanout: int, operations: int, together: int, draw: random.Random
) -> None:
    fabric, ranks = controllers(size, fanout, together)
    log: list[list[Decision]] = [[] for _ in ranks]
    todo = [(rank, key) for rank in range(size) for key in range(operations)]
    draw.shuffle(todo)
    for rank, key in todo:
        ranks[rank].announce(key, signature("float32"))
        if draw.random() < 0.2:
            log[rank] += ranks[rank].step()
    settle(fabric, ranks, log, draw)
    assert all(entry == log[0] for entry in log)
    assert sorted(key for decision in log[0] for key in decision.keys) == list(range(operations))
    assert all(decision.error is None and len(decision.keys) <= together for decision in log[0])


@given(st.integers(2, 20), st.integers(1, 4), st.data(), st.randoms())
def test_a_mismatch_names_every_rank(size: int, fanout: int, data: st.DataObject, draw: random.Random) -> None:
    values = data.draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=size, max_size=size))
    fabric, ranks = controllers(size, fanout)
    log: list[list[Decision]] = [[] for _ in ranks]
    for rank, value in enumerate(values):
        ranks[rank].announce("x", signature(value))
    settle(fabric, ranks, log, draw)
    assert all(entry == log[0] for entry in log)
    (decision,) = log[0]
    if len(set(values)) == 1:
        assert decision == Decision(("x",), None)
    else:
        lines = (decision.error or "").splitlines()[1:]
        expected = {
            f"  {ranks_text([r for r in range(size) if values[r] == value])}: allreduce({value}(1))"
            for value in set(values)
        }
        assert set(lines) == expected


@given(st.integers(2, 20), st.integers(1, 4), st.randoms())
def test_ranks_that_all_wait_for_different_things_are_told(size: int, fanout: int, draw: random.Random) -> None:
    fabric, ranks = controllers(size, fanout)
    log: list[list[Decision]] = [[] for _ in ranks]
    names = ["b" if rank == size - 1 else "a" for rank in range(size)]
    for rank, name in enumerate(names):
        ranks[rank].announce(name, signature("f"))
    settle(fabric, ranks, log, draw)
    for rank in draw.sample(range(size), size):
        assert log[0] == []
        ranks[rank].report_blocked([(names[rank], signature("f"))])
        settle(fabric, ranks, log, draw)
    assert all(entry == log[0] for entry in log)
    (decision,) = log[0]
    assert set(decision.keys) == {"a", "b"}
    for rank, name in enumerate(names):
        assert f"rank {rank} waits for '{name}'" in (decision.error or "")
    for controller in ranks:  # and the names can be used again
        controller.announce("a", signature("f"))
    settle(fabric, ranks, log, draw)
    assert all(entry[1:] == [Decision(("a",), None)] for entry in log)


@pytest.mark.parametrize("late", range(7))
def test_one_rank_that_goes_on_is_enough(late: int) -> None:
    """All ranks were blocked; then one submits what the others wait for (from another thread of its program)."""
    draw = random.Random(0)
    fabric, ranks = controllers(7, fanout=2)
    log: list[list[Decision]] = [[] for _ in ranks]
    for rank, controller in enumerate(ranks):
        controller.announce("theirs" if rank != late else "its own", signature("f"))
        if rank != late:
            controller.report_blocked([("theirs", signature("f"))])
    settle(fabric, ranks, log, draw)
    ranks[late].announce("theirs", signature("f"))
    ranks[late].report_blocked([("its own", signature("f"))])
    settle(fabric, ranks, log, draw)
    assert log == [[Decision(("theirs",), None)]] * 7  # its report was from before that decision
    ranks[late].report_blocked([("its own", signature("f"))])
    settle(fabric, ranks, log, draw)
    assert all(len(entry) == 1 for entry in log)  # the others are free, so nobody is told of a deadlock


@pytest.mark.parametrize("size", [2, 9, 64, 300])
def test_letters_do_not_grow_with_the_number_of_ranks(size: int) -> None:
    """A batch of operations costs a rank one letter to its parent and one to each of its children."""
    fabric, ranks = controllers(size, FANOUT)
    log: list[list[Decision]] = [[] for _ in ranks]
    for _ in range(3):
        for rank in reversed(range(size)):
            for key in range(100):
                ranks[rank].announce(key, signature("float32"))
            log[rank] += ranks[rank].step()
        for rank in range(size):
            log[rank] += ranks[rank].step()
    assert all(len(entry) == 3 for entry in log)
    assert max(fabric.traffic(rank).control_messages for rank in range(size)) <= 3 * (1 + FANOUT)


Use = tuple[Key, list[str]]
"""A key, and the value that each rank submits under it."""


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[Use]]:
    """A number of ranks, and what they submit: few names, used again and again, mostly with the values of before."""
    size = draw(st.integers(2, 12))
    uses: list[Use] = []
    for number in range(draw(st.integers(0, 25))):
        values = [draw(st.sampled_from(["a", "b"]))] * size
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
            values[draw(st.integers(0, size - 1))] = draw(st.sampled_from(["a", "b", "c"]))
        uses.append((draw(st.sampled_from(["x", "y", "z", number])), values))
    return size, uses


@given(programs(), st.integers(1, 4), st.integers(1, 5), st.integers(1, 7), st.randoms())
def test_what_was_agreed_before_is_checked_all_the_same(
    program: tuple[int, list[Use]], fanout: int, cache_entries: int, together: int, draw: random.Random
) -> None:
    """Letters that name known operations by ids, in caches that soon are full, of ranks that are far apart in time."""
    size, uses = program
    fabric, ranks = controllers(size, fanout, together, cache_entries)
    log: list[list[Decision]] = [[] for _ in ranks]
    todo = [list(uses) for _ in ranks]

    def in_flight(rank: int) -> set[Key]:
        done = [key for decision in log[rank] for key in decision.keys]
        submitted = [key for key, _ in uses]
        for key, _ in todo[rank]:
            submitted.remove(key)
        return {key for key in submitted if submitted.count(key) > done.count(key)}

    for _ in range(5000 * len(uses)):
        if not any(todo):
            break
        rank = draw.randrange(size)
        busy = in_flight(rank)
        free = [n for n, (key, _) in enumerate(todo[rank]) if key not in busy | {key for key, _ in todo[rank][:n]}]
        if free and draw.random() < 0.7:
            key, values = todo[rank].pop(draw.choice(free))
            ranks[rank].announce(key, signature(values[rank]))
        else:
            log[rank] += ranks[rank].step()
    assert not any(todo)
    settle(fabric, ranks, log, draw)
    assert all(entry == log[0] for entry in log)
    found = {key: [d.error for d in log[0] if key in d.keys] for key, _ in uses}
    for key, errors in found.items():
        expected = [values for other, values in uses if other == key]
        assert [error is None for error in errors] == [len(set(values)) == 1 for values in expected]
        for error, values in zip(errors, expected, strict=True):
            for value in set(values) if error else ():
                who = ranks_text([rank for rank in range(size) if values[rank] == value])
                assert f"  {who}: allreduce({value}(1))" in (error or "").splitlines()


def test_a_letter_from_before_the_cache_began_anew_is_understood() -> None:
    _, ranks = controllers(3, fanout=1, cache_entries=1)
    log: list[list[Decision]] = [[] for _ in ranks]

    def step(*order: int) -> None:
        for rank in order:
            log[rank] += ranks[rank].step()

    for key in ("x", "y"):  # both become id 0, one after the other
        for rank in (2, 1, 0):
            ranks[rank].announce(key, signature("f"))
            step(rank)
        if key == "x":
            step(1, 2)
    ranks[2].announce("x", signature("f"))
    step(2, 1)  # rank 2 says "id 0" before it has heard of y, to rank 1, which has
    for rank in (1, 0):
        ranks[rank].announce("x", signature("f"))
    step(1, 1, 0, 1, 2, 2)
    assert log == [[Decision(("x",), None), Decision(("y",), None), Decision(("x",), None)]] * 3
    for rank in (2, 1, 0):
        ranks[rank].announce("x", signature("f"))
        step(rank)
    assert not any(controller._history.retired for controller in ranks)  # all have heard of y by now


@pytest.mark.parametrize("first", ["the report", "the news"])
def test_a_report_that_crosses_the_news_of_its_failure_does_not_count_again(first: str) -> None:
    """A thread submits what the other ranks wait for, at the moment when all ranks are told that nobody will."""
    fabric, ranks = controllers(3, fanout=1)
    log: list[list[Decision]] = [[] for _ in ranks]

    def step(rank: int) -> None:
        log[rank] += ranks[rank].step()

    for rank, key in ((2, "b"), (1, "a"), (0, "a")):
        ranks[rank].announce(key, signature("f"))
        step(rank)
        ranks[rank].report_blocked([(key, signature("f"))])
    step(1)
    if first == "the news":
        step(0)
    ranks[2].announce("a", signature("f"))
    step(2)
    if first == "the report":
        step(0)
    assert [decision.error is None for decision in log[0]] == [False]
    settle(fabric, ranks, log, random.Random(0))
    assert all(entry == log[0] and len(entry) == 1 for entry in log)
    for rank in (0, 1):
        ranks[rank].announce("a", signature("f"))
    settle(fabric, ranks, log, random.Random(0))
    assert all(len(entry) == 1 for entry in log)  # rank 2's own "a" failed with the others'
    ranks[2].announce("a", signature("f"))
    settle(fabric, ranks, log, random.Random(0))
    assert all(entry[1:] == [Decision(("a",), None)] for entry in log)


@st.composite
def uneven_programs(draw: st.DrawFn) -> tuple[list[Use], list[int]]:
    """What the ranks submit, and how many of it each does before it joins."""
    size, uses = draw(programs())
    names = {key: n for n, (key, _) in enumerate(uses)}  # here a name is used once before all join
    uses = [use for n, use in enumerate(uses) if names[use[0]] == n]
    return uses, draw(st.lists(st.integers(0, len(uses)), min_size=size, max_size=size))


@given(st.lists(uneven_programs(), max_size=4), st.integers(1, 4), st.integers(1, 40), st.integers(1, 7), st.randoms())
def test_ranks_that_have_joined_count_as_having_submitted_everything(
    epochs: list[tuple[list[Use], list[int]]], fanout: int, cache_entries: int, together: int, draw: random.Random
) -> None:
    size = max([2, *(len(stops) for _, stops in epochs)])
    _, ranks = controllers(size, fanout, together, cache_entries)
    log: list[list[Decision]] = [[] for _ in ranks]
    given_parts: list[dict[Key, Signature]] = [{} for _ in ranks]

    def step(rank: int) -> None:
        log[rank] += ranks[rank].step()
        assert not given_parts[rank].keys() & ranks[rank].unsubmitted.keys()
        given_parts[rank].update(ranks[rank].unsubmitted)
        ranks[rank].unsubmitted.clear()

    for uses, some_stops in epochs:
        stops = [*some_stops, *[0] * (size - len(some_stops))]
        values = {key: [*each, *["a"] * (size - len(each))] for key, each in uses}
        todo: list[list[Key | None]] = [[*draw.sample(list(values)[:stop], stop), None] for stop in stops]
        while any(todo):
            rank = draw.randrange(size)
            if todo[rank] and draw.random() < 0.5:
                if (key := todo[rank].pop(0)) is None:
                    ranks[rank].join()
                else:
                    ranks[rank].announce(key, signature(values[key][rank]))
            else:
                step(rank)
        while any(not entry or entry[-1].last_joined is None for entry in log):
            step(draw.randrange(size))
        assert all(entry == log[0] for entry in log)
        *decisions, end = log[0]
        assert end == Decision((), None, end.last_joined) and end.last_joined in range(size)
        decided = {key: decision for decision in decisions for key in decision.keys}
        assert sorted(map(str, decided)) == sorted(map(str, list(values)[: max(stops)]))
        assert sum(len(decision.keys) for decision in decisions) == len(decided)
        for number, (key, each) in enumerate(values.items()):
            submitted = [rank for rank in range(size) if stops[rank] > number]
            if not submitted:
                continue
            variants = {each[rank] for rank in submitted}
            error = decided[key].error
            assert (error is None) == (len(variants) == 1)
            for value in variants if error else ():
                who = ranks_text([rank for rank in submitted if each[rank] == value])
                assert f"  {who}: allreduce({value}(1))" in (error or "").splitlines()
            for rank in range(size):
                stands_in = error is None and rank not in submitted
                assert given_parts[rank].get(key) == (signature(*variants) if stands_in else None)
        for entry, parts in zip(log, given_parts, strict=True):
            entry.clear()
            parts.clear()


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 5), st.sampled_from([2, CACHE_ENTRIES]), st.integers(0))
def test_a_milestone_needs_all_ranks_whether_they_have_joined_or_not(
    size: int, fanout: int, milestones: int, cache_entries: int, seed: int
) -> None:
    """One thread of each rank comes to the milestones, twice to each; another one joins three times."""
    draw = random.Random(seed)
    _, ranks = controllers(size, fanout, 1, cache_entries)
    log: list[list[Decision]] = [[] for _ in ranks]
    names: list[Key] = [f"milestone {number}" for number in range(milestones)]
    to_come = [draw.sample(names, milestones) + draw.sample(names, milestones) for _ in ranks]
    to_do: list[list[str]] = [["operation", "join"] * 3 for _ in ranks]
    come: list[list[Key]] = [[] for _ in ranks]
    while any(to_come) or any(to_do) or any(entry != log[0] for entry in log) or len(log[0]) < 2 * milestones + 6:
        rank = draw.randrange(size)
        joined = len([done for done in log[rank] if done.last_joined is not None])
        done = [key for decision in log[rank] for key in decision.keys]
        match draw.choice(["step", "come", "do"]):
            case "come" if to_come[rank] and come[rank].count(key := to_come[rank][0]) == done.count(key):
                come[rank].append(to_come[rank].pop(0))
                ranks[rank].announce(key, Milestone().signature)
            case "do" if to_do[rank] and to_do[rank][0] == "operation" and len(to_do[rank]) == 6 - 2 * joined:
                to_do[rank].pop(0)
                ranks[rank].announce("operation", signature("f"))
            case "do" if to_do[rank] and to_do[rank][0] == "join":
                to_do[rank].pop(0)
                ranks[rank].join()
            case _:
                for decision in ranks[rank].step():
                    for key in decision.keys:
                        if key in names:  # nobody is left out
                            assert min(each.count(key) for each in come) > sum(key in old.keys for old in log[rank])
                    log[rank].append(decision)
                assert not ranks[rank].unsubmitted.keys() & set(names)
                ranks[rank].unsubmitted.clear()
    assert all(decision.error is None for decision in log[0])
    assert sum(decision.last_joined is not None for decision in log[0]) == 3


def test_the_last_to_join_is_told_whatever_the_way_of_its_letter() -> None:
    fabric, ranks = controllers(7, fanout=2)
    log: list[list[Decision]] = [[] for _ in ranks]
    draw = random.Random(0)
    for last in range(7):
        for rank in draw.sample([rank for rank in range(7) if rank != last], 6):
            ranks[rank].join()
        settle(fabric, ranks, log, draw)
        assert all(len(entry) == last for entry in log)
        ranks[last].join()
        settle(fabric, ranks, log, draw)
        assert all(entry[-1] == Decision((), None, last) for entry in log)


def test_what_a_rank_had_submitted_is_known_before_that_it_has_joined() -> None:
    """All ranks join at once, each with operations that only it has submitted, along a chain."""
    fabric, ranks = controllers(5, fanout=1)
    log: list[list[Decision]] = [[] for _ in ranks]
    for rank, controller in enumerate(ranks):
        controller.announce(f"of {rank}", signature("f"))
        controller.join()
    for rank in reversed(range(5)):  # each reads all that the ranks below it have to say in one step
        log[rank] += ranks[rank].step()
    settle(fabric, ranks, log, random.Random(0))
    assert all(entry == log[0] for entry in log)
    assert [decision.last_joined is None for decision in log[0]] == [True] * (len(log[0]) - 1) + [False]
    assert sorted(key for decision in log[0] for key in decision.keys) == [f"of {rank}" for rank in range(5)]


@pytest.mark.parametrize("size", [2, 9, 64, 300])
def test_joining_costs_one_letter_up_and_one_plan_down(size: int) -> None:
    fabric, ranks = controllers(size, FANOUT)
    for rank in reversed(range(size)):
        ranks[rank].join()
        assert ranks[rank].step() == ([] if rank else [Decision((), None, 0)])
    for rank in range(1, size):
        assert ranks[rank].step() == [Decision((), None, 0)]
    letters = [fabric.traffic(rank).control_messages for rank in range(size)]
    children = [
        len([c for c in range(rank * FANOUT + 1, rank * FANOUT + FANOUT + 1) if c < size]) for rank in range(size)
    ]
    assert letters == [bool(rank) + children[rank] for rank in range(size)]


def test_ranks_text() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 2, 1, 5, 7, 8]) == "ranks 0-2, 5, 7-8"


def test_names_that_are_used_once_are_forgotten() -> None:
    """By all ranks at the same points of their sequences: each understands the others' ids all the way."""
    fabric, ranks = controllers(5, 2, cache_entries=16)
    log: list[list[Decision]] = [[] for _ in ranks]
    draw = random.Random(0)
    for number in range(500):
        for rank in draw.sample(ranks, len(ranks)):
            rank.announce(f"once {number}", signature("float32"))
            rank.announce("again", signature("float32"))
        settle(fabric, ranks, log, draw)
    assert all(entry == log[0] for entry in log)
    assert sorted(key for decision in log[0] for key in decision.keys) == sorted(
        [*(f"once {number}" for number in range(500)), *["again"] * 500]
    )
    for rank in ranks:
        assert len(rank._cache.entries) == len(rank._cache.ids) <= 16
        assert len(rank._history.retired) <= 2
        assert not rank._announced and not rank._history.failed and not rank._ready._table
