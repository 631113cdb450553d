"""What was made before ``shutdown()`` goes on in the world of the next ``init()``: arrays of any library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.config import Config
from hvdlite.testing import on_ranks
from hvdlite.world import World

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
