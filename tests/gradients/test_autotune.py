"""Plans for the exchange: how buckets are dealt, and which plan a search settles on."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.config import Config
from hvdlite.gradients.autotune import MEASURED_STEPS, ROUNDS, SETTLE_STEPS, Autotune, Candidate, candidates
from hvdlite.gradients.planner import Planner, plan_buckets
from hvdlite.protocols import Plan


@given(st.data(), st.lists(st.integers(0, 100), min_size=1, max_size=20), st.integers(1, 200))
def test_every_tensor_is_in_one_bucket(data: st.DataObject, nbytes: list[int], bucket_bytes: int) -> None:
    order = data.draw(st.permutations(range(len(nbytes))))[: data.draw(st.integers(0, len(nbytes)))]
    buckets = plan_buckets(order, nbytes, bucket_bytes)
    if not buckets:
        assert sum(nbytes[index] for index in order[:-1]) < bucket_bytes
        return
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(nbytes)))
    assert [i for bucket in buckets for i in bucket][: len(order)] == list(order)
    for bucket in buckets[:-1]:
        assert sum(nbytes[i] for i in bucket) >= bucket_bytes > sum(nbytes[i] for i in bucket[:-1])


def search(seconds: list[float], **options: Any) -> tuple[Autotune, list[Plan], int]:
    """Go through a search in which plan number n takes ``seconds[n]`` a step. Returns it, the plans followed, and the steps."""
    plans = [Candidate(f"plan {n}", Plan(chunk_bytes=n + 1)) for n in range(len(seconds))]
    now = 0.0
    tuner = Autotune(plans, lambda value: value, clock=lambda: now, **options)
    followed, steps = [tuner.current], 0
    while not tuner.done:
        now += seconds[tuner.current.chunk_bytes - 1]
        steps += 1
        if tuner.step():
            followed.append(tuner.current)
    assert not tuner.step()
    return tuner, followed, steps


def test_the_fastest_plan_wins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "tried.csv"
    tuner, followed, steps = search([1.0, 0.5, 2.0], log=str(log), talks=True)
    assert tuner.current.chunk_bytes == 2
    assert [plan.chunk_bytes for plan in followed[:4]] == [1, 2, 3, 1]
    # The time up to the first step of a trial is not of that trial.
    assert steps == ROUNDS * 3 * (1 + SETTLE_STEPS + MEASURED_STEPS)
    rows = list(csv.reader(log.read_text().splitlines()))
    assert len(rows) == 1 + ROUNDS * 3 + 1
    assert [float(row[-1]) for row in rows[1:4]] == [1.0, 0.5, 2.0]
    assert rows[-1][:2] == ["chosen", "plan 1"]
    said = caplog.text
    assert "plan 1: a step takes 0.50 of its time without" in said
    assert str(log) in said


def test_the_default_stays_unless_another_is_clearly_faster(caplog: pytest.LogCaptureFixture) -> None:
    tuner, _, _ = search([1.0, 0.99, 1.5], talks=True)
    assert tuner.current.chunk_bytes == 1
    assert "the default stays; the best of the others (plan 1) took 0.99 of its time" in caplog.text


def test_what_is_tried() -> None:
    names = [each.name for each in candidates(Plan(), [((0,), (1,)), ()], several_hosts=False)]
    assert names[0] == "default"
    assert "overlap, 2 buckets" in names
    assert len(names) == len(set(names))
    assert not any("messages" in name for name in names)
    assert any("messages" in each.name for each in candidates(Plan(), [], several_hosts=True))


def planner(config: Config, answers: list[Any], adapts: bool = True, cores: bool = True) -> Planner:
    """For four gradients of 1 MB each; the other rank says what `answers` gives."""
    return Planner(
        [10**6] * 4, Plan(), config, 1 if cores else 10**6, False, lambda mine: [mine, *answers], True, adapts
    )


def learn(plans: Planner, seconds: float) -> Plan | None:
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        for index in order:
            plans.ready(index)
        plan = plans.exchanged(seconds)
    return plan


def test_the_second_step_teaches_order_and_size() -> None:
    plan = learn(planner(Config(overlap="auto"), [([], 4e-3, True)]), seconds=5e-3)
    assert plan is not None
    assert plan.buckets == ((3,), (2,), (1,), (0,)), "each takes a millisecond, in the order of the backward pass"
    assert learn(planner(Config(overlap="auto"), [([], 4e-3, True)]), seconds=0.9e-3) is None, (
        "too little to be worth it"
    )


def test_without_a_core_to_spare_nothing_overlaps() -> None:
    assert learn(planner(Config(overlap="auto"), [([], 4e-3, False)]), 5e-3) is None
    assert learn(planner(Config(overlap="auto"), [], cores=False), 5e-3) is None
    assert learn(planner(Config(overlap="off"), []), 5e-3) is None
    forced = learn(planner(Config(overlap="on"), [([], 4e-3, False)], cores=False), 1e-6)
    assert forced is not None
    assert len(forced.buckets) == 2


def test_speculation_that_fails_again_and_again_is_given_up() -> None:
    plans = planner(Config(overlap="on"), [([], 4e-3, False)])
    learn(plans, 5e-3)
    assert plans.exchanged(1e-3, failed=1) is None
    plan = plans.exchanged(1e-3, failed=2)
    assert plan == Plan()


def test_nothing_to_search_is_said(caplog: pytest.LogCaptureFixture) -> None:
    plans = planner(Config(autotune=True), [], adapts=False)
    assert not plans.learning
    assert "nothing to choose from" in caplog.text
