"""A rank that shares its core with whoever it waits for moves to its own core, and is not bound to it."""

from __future__ import annotations

import os
import resource
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.ranks import own_core

OFFERS = 100


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The sets of cores to which the process is moved. It may use the cores 2, 4, 5 and 7."""
    found: list[set[int]] = []
    monkeypatch.setattr(own_core, "_place", None)
    monkeypatch.setattr(own_core, "_offers", own_core._Offers())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 4, 5, 7})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: found.append(cores))
    return found


def others_run(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Let another process take the core in this share of the offers."""
    offers = 0

    def offer() -> None:
        nonlocal offers
        offers += 1

    monkeypatch.setattr(os, "sched_yield", offer)
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_nivcsw=1000 + int(offers * share)))


def offer_often() -> None:
    for _ in range(OFFERS):
        own_core.yield_core()


def test_a_rank_that_shares_its_core_goes_to_its_own(monkeypatch: pytest.MonkeyPatch, moves: list[set[int]]) -> None:
    others_run(monkeypatch, 1.0)
    own_core.settle(1, 2)
    offer_often()
    assert moves[:2] == [{5}, {2, 4, 5, 7}]
    assert moves[-1] == {2, 4, 5, 7}


@pytest.mark.parametrize(("share", "place"), [(0.1, (1, 2)), (1.0, None), (1.0, (1, 5))])
def test_it_stays_where_it_is(
    monkeypatch: pytest.MonkeyPatch, moves: list[set[int]], share: float, place: tuple[int, int] | None
) -> None:
    """The core is its own mostly; or ranks are threads; or there are fewer cores than ranks."""
    others_run(monkeypatch, share)
    if place is not None:
        own_core.settle(*place)
    offer_often()
    assert moves == []


def test_a_background_thread_stays(monkeypatch: pytest.MonkeyPatch, moves: list[set[int]]) -> None:
    others_run(monkeypatch, 1.0)
    own_core.settle(0, 2)
    thread = threading.Thread(target=offer_often, name="hvdlite-calls")
    thread.start()
    thread.join()
    assert moves == []


def test_a_container_that_forbids_it(monkeypatch: pytest.MonkeyPatch, moves: list[set[int]]) -> None:
    others_run(monkeypatch, 1.0)
    asked = []

    def refuse(_: int, cores: set[int]) -> None:
        asked.append(cores)
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    own_core.settle(0, 2)
    offer_often()
    assert asked == [{2}]


@given(st.sets(st.integers(0, 300), min_size=1), st.integers(1, 40))
def test_each_rank_has_a_core_of_its_own(cores: set[int], ranks: int) -> None:
    homes = [own_core.home(cores, rank, ranks) for rank in range(ranks)]
    if ranks > len(cores):
        assert homes == [None] * ranks
    else:
        assert len(set(homes)) == ranks
        assert cores.issuperset(homes)


def test_no_thread_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_core, "_place", None)
    before = os.sched_getaffinity(0)
    own_core._go_home(0, 1)
    assert os.sched_getaffinity(0) == before
