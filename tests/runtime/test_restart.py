"""What was made before ``shutdown()`` goes on in the world of the next ``init()``: arrays of any library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite as hvd
import hvdlite_tf as hvd_tf
from hvdlite.api import world
from hvdlite.config import Config
from hvdlite.errors import ArgumentError
from hvdlite.runtime.world import World
from hvdlite.testing import on_ranks

CONFIG = Config(deadlock_time_seconds=0.3, advice=False)
Kept = tuple[Any, World]


def begin(before: list[Kept], do: Callable[[Any], Any]) -> Kept:
    """One rank of one world: `do` is called with what it has returned in the world before."""
    kept = None
    if before:
        kept, left = before[hvd.rank()]
        world().groups.adopt(left.groups.left())
    return do(kept), world()


def test_a_rank_joins_after_a_restart_before_it_has_a_gradient() -> None:
    def first(_: None) -> hvd.DistributedGradient:
        combine = hvd.DistributedGradient()
        np.testing.assert_array_equal(combine(np.full(3, hvd.rank() + 1.0)), np.full(3, (hvd.size() + 1) / 2))
        return combine

    def second(combine: hvd.DistributedGradient) -> hvd.DistributedGradient:
        for step in range(2 * hvd.rank()):
            np.testing.assert_array_equal(combine(np.full(3, 10.0 * step)), np.full(3, 10.0 * step))
        assert hvd.join() == 1
        np.testing.assert_array_equal(combine(np.full(3, hvd.rank() + 1.0)), np.full(3, (hvd.size() + 1) / 2))
        return combine

    def third(combine: hvd.DistributedGradient) -> hvd.DistributedGradient:
        np.testing.assert_array_equal(combine(np.full(3, hvd.rank() + 1.0)), np.full(3, (hvd.size() + 1) / 2))
        return combine

    before: list[Kept] = []
    for life in (first, second, third):
        before = on_ranks(2, begin, before, life, config=CONFIG)


def test_a_strategy_of_as_many_ranks_goes_on_and_another_one_says_what_to_do() -> None:
    def total(strategy: hvd_tf.Strategy) -> float:
        own = strategy.run(lambda: tf.constant(hvd.rank() + 1.0))
        return float(strategy.reduce("SUM", own))

    def first(_: None) -> hvd_tf.Strategy:
        return hvd_tf.Strategy()

    def again(strategy: hvd_tf.Strategy) -> hvd_tf.Strategy:
        assert total(strategy) == 3.0
        return strategy

    def fewer(strategy: hvd_tf.Strategy) -> None:
        for use in (total, hvd_tf.Strategy.scope):
            with pytest.raises(ArgumentError, match=r"made on rank 0 of 2, and this is rank 0 of 1 after a restart"):
                use(strategy)
        assert total(hvd_tf.Strategy()) == 1.0

    before: list[Kept] = []
    for size, life in ((2, first), (2, again), (1, fewer)):
        before = on_ranks(size, begin, before, life, config=CONFIG)
