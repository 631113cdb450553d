"""Pairs of a program and a way to distribute it, drawn anew in each run: each equals one process, or is refused in words."""

from __future__ import annotations

import importlib
import random

import pytest

from tests.one_process.excuses import EXCUSES
from tests.one_process.table import FRAMEWORKS, GOOD, draw, pairs_of, picture, run

BUDGETS = {"torch": 20.0, "keras": 10.0, "keras_on_torch": 10.0}
"""Seconds for each job of drawn pairs. What importing TensorFlow takes comes on top."""
LIMIT = 3600.0


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("framework", ["torch", "keras", pytest.param("keras_on_torch", marks=pytest.mark.weekly)])
def test_each_pair_equals_one_process_or_is_refused(framework: str, pytestconfig: pytest.Config) -> None:
    everything = pytestconfig.option.everything
    seed = random.randrange(10**6)
    jobs = pairs_of(framework).items() if everything else draw(framework, seed, combined=False)
    results = [
        result for ranks, pairs in jobs for result in run(pairs, ranks, LIMIT if everything else BUDGETS[framework])
    ]
    print(f"seed {seed}: python -m tests.one_process --framework {framework} --seed {seed}\n{picture(results)}")
    wrong = [f"{result.outcome}: {result.pair}\n{result.detail}" for result in results if result.outcome not in GOOD]
    assert not wrong, "\n".join(wrong)


def test_excuses_name_pairs_that_are_there() -> None:
    for excuse in EXCUSES:
        kind = importlib.import_module(f"tests.one_process.{excuse.framework}_ways")
        assert set(excuse.ways) <= set(kind.WAYS)
        assert set(excuse.rows) <= set(kind.PROGRAMS)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_order_of_drawn_pairs_is_that_of_the_seed(framework: str) -> None:
    for combined in (True, False):
        one, again, other = (dict(draw(framework, seed, combined)) for seed in (1, 1, 2))
        assert one == again != other
        assert all(set(pairs) <= set(one[ranks]) for ranks, pairs in pairs_of(framework).items())
