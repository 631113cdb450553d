"""Several optimizers of equal layout in one program (folds, a search over rates, a GAN): each keeps its own state.

The truth is a closed form: SGD on gradients that do not depend on the weights.
"""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.adapter import gradient_memory
from hvdlite.adapter.gradient_memory import Registry
from hvdlite.adapter.identity import members
from hvdlite.api import world
from hvdlite.errors import MismatchError
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: ranks that are threads share TensorFlow's pool.
    tf.config.threading.set_inter_op_parallelism_threads(8)

pytestmark = pytest.mark.usefixtures("fresh_world")

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shard": {"shard": True},
    "local steps": {"local_steps": hvd.LocalSGD(every=1)},
    "topk": {"compression": hvd.Compression.topk(1.0)},
}


class Trained:
    """A variable of `length` ones and its optimizer, which steps by `rate` times the mean of what `step` is given."""

    def __init__(self, rate: float, kind: str = "plain", length: int = 12, **options: Any) -> None:
        self.rate, self.steps, self.expected = rate, 0, np.ones(length)
        self.variable = keras.Variable(np.ones(length, np.float32))
        options = dict(KINDS[kind], **options)
        if kind == "topk":  # which has a memory, so each optimizer needs its own
            options["compression"] = hvd.Compression.topk(1.0)
        self.optimizer: Any = hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options)
        self.optimizer.build([self.variable])

    def step(self, there: list[int] | None = None) -> None:
        """Step with a gradient that differs from rank to rank, on the ranks that are `there`; all by default."""
        there = list(range(hvd.size())) if there is None else there
        self.steps += 1
        self.expected -= self.rate * np.mean([self.gradient(rank) for rank in there], axis=0)
        if hvd.rank() in there:
            self.optimizer.apply([tf.constant(self.gradient(hvd.rank()))], [self.variable])

    def gradient(self, rank: int) -> Any:
        return np.full(len(self.expected), rank + 1 + 0.25 * self.steps, np.float32)

    def check(self) -> None:
        np.testing.assert_allclose(self.variable.numpy(), self.expected, rtol=1e-5)
        assert int(self.optimizer.iterations) == self.steps
        assert float(self.optimizer.learning_rate) == pytest.approx(self.rate)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_join_gives_no_optimizer_the_state_of_another(ranks: Any, kind: str) -> None:
    """Whatever order a set of them has: each rank drops others in between, and makes one for itself."""

    def check() -> None:
        kept: list[Trained] = []
        alone: list[Trained] = []
        for number in range(8):
            dropped = Trained(7.0, kind)
            dropped.step()
            del dropped
            if kind in ("plain", "topk"):
                alone += [Trained(5.0) for _ in range(hvd.rank())]
            kept.append(Trained(0.1 * (number + 1), kind))
            for _ in range(number % 3 + 1):
                kept[-1].step()
            hvd.join()
            for each in kept:
                each.check()
        for each in [*kept, *kept[::-1]]:
            each.step()
        hvd.join()
        for each in kept:
            each.check()

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_ranks_that_miss_steps_get_the_state_of_each_optimizer(ranks: Any) -> None:
    """Also of one with which a rank has not stepped yet, while other ranks have made others for themselves."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        alone = [Trained(5.0) for _ in range(rank)]  # the numbers of the ranks differ
        first, second, third = (Trained(rate) for rate in (0.1, 0.2, 0.3))
        for each in (first, second):
            each.step()
        others = list(range(1, size))
        for _ in range(2):
            second.step(others)
        third.step(others)  # its first step, of which rank 0 knows nothing
        first.step(others)
        hvd.join()
        first.check()
        second.check()
        # Rank 0 cannot know which of its optimizers has stepped: it has a single one of which nobody knows anything.
        third.check()
        for each in (third, second, first):  # no rank takes one for another
            each.step()
        hvd.join()
        for each in (first, second, third):
            each.check()
        for each in alone:
            assert int(each.optimizer.iterations) == 0
            np.testing.assert_array_equal(each.variable.numpy(), 1.0)

    ranks(check)


def test_layouts_that_were_released_and_made_anew(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_memory, "LAYOUTS", 2)

    def check() -> None:
        kept = []
        for number in range(4):
            kept.append(Trained(0.1 * (number + 1)))
            kept[-1].step()
            for length in (2, 3, 4):
                Trained(1.0, length=length).step()
        hvd.join()
        for each in kept:
            each.check()

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_optimizers_of_process_sets(ranks: Any) -> None:
    """Ranks that train in a set have made more optimizers than the others."""

    def check() -> None:
        some = hvd.new_group([0, 1])
        for _ in range(3 * some.included()):
            Trained(5.0, process_set=some)
        both = [Trained(0.1), Trained(0.2)]
        everybody = list(range(hvd.size()))
        both[1].step(everybody[1:])
        hvd.join()
        both[1].check()
        both[0].check()
        hvd.remove_process_set(some)

    ranks(check)


def test_optimizers_that_are_dropped_leave_nothing(ranks: Any) -> None:
    def check() -> None:
        here = world("a test")
        for round_ in range(20):
            Trained(0.1, "shard" if round_ % 2 else "plain").step()
            hvd.DistributedGradient()([np.ones(3)])
        gc.collect()
        hvd.join()
        hvd.DistributedGradient()([np.ones(3)])
        registry = Registry.of(here, None)
        assert len(registry.layouts) <= 2
        assert not members(here.group(None))
        # Memory of sharded optimizers is released when others are made.
        assert len(here.group(None).exchanges) < 16

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_steps_of_different_optimizers_do_not_meet(ranks: Any) -> None:
    """Two optimizers of one layout and rate, whose order of steps differs between the ranks."""

    def check() -> None:
        both = [Trained(0.1), Trained(0.1)]
        for each in both:
            each.step()
        swapped = both if hvd.rank() == 0 else both[::-1]
        with pytest.raises(MismatchError, match="of different optimizers"):
            swapped[0].step()

    ranks(check)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("built", [False, True])
def test_a_rank_that_never_steps(ranks: Any, built: bool) -> None:
    """It takes over what the others have reached, or all ranks are told that it cannot."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        variable = keras.Variable(np.ones(12, np.float32))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
        if built:
            optimizer.build([variable])
        for _ in range(2 * (rank == size - 1)):
            optimizer.apply([tf.ones(12)], [variable])
        if built:
            hvd.join()
            np.testing.assert_array_equal(variable.numpy(), 0.0)
            assert int(optimizer.iterations) == 2
        else:
            with pytest.raises(Exception, match=r"called join\(\) before the first step.*optimizer.build"):
                hvd.join()
        hvd.barrier()

    ranks(check)
