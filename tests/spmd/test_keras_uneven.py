"""Ranks with different numbers of batches, or none, where a model has more than one optimizer that steps in every batch."""

from __future__ import annotations

import gc
import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.operations.negotiation.engine import Engine
from hvdlite.operations.negotiation.handle import Handle
from hvdlite_tf.gradients import own_variables
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: ranks that are threads share TensorFlow's pool.
    tf.config.threading.set_inter_op_parallelism_threads(8)

pytestmark = pytest.mark.filterwarnings("ignore:.*ran out of data", "ignore:.*shuffle=True")

_rng = np.random.default_rng(3)
X = _rng.standard_normal((64, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]]).astype("float32")


def dense() -> Any:
    layer = keras.layers.Dense(1, use_bias=False)
    layer.build((None, 3))
    layer.set_weights([np.array([[0.3], [0.1], [-0.2]], "float32")])
    return layer


class Pair(keras.Model):  # type: ignore[misc]  # mypy does not see Keras
    """As a GAN: the second part is trained in every `every`-th batch only, by an optimizer of its own.

    Args:
        every: How often.
        wrap: Makes optimizers distributed.
        tape: Exchange by tapes, with plain optimizers.
    """

    def __init__(self, every: int, wrap: Any, tape: bool) -> None:
        super().__init__()
        self.first, self.second, self.every, self.tape = dense(), dense(), every, tape
        self.first_optimizer = wrap(keras.optimizers.SGD(0.05, momentum=0.9))
        self.second_optimizer = wrap(keras.optimizers.Adam(0.05))
        self.batches = 0
        self.built = True

    def call(self, x: Any) -> Any:
        return self.first(x) + self.second(x)

    def step(self, x: Any, y: Any, part: Any, optimizer: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        tape = hvd.DistributedGradientTape(tape) if self.tape else tape
        weights = part.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.step(x, y, self.first, self.first_optimizer)
        self.batches += 1
        if self.batches % self.every == 0:
            self.step(x, y, self.second, self.second_optimizer)
        return {"loss": tf.constant(0.0)}


def one_process(shares: list[Any], every: int, epochs: int) -> list[np.ndarray]:
    """Each step with the joined batch of the ranks that have one; whose batches are counted, if they are not the same, is the
    rank with the most."""
    model = Pair(every, lambda optimizer: optimizer, False)
    for _ in range(epochs):
        for number in range(max(map(len, shares)) // 4):
            rows = slice(4 * number, 4 * number + 4)
            data = [(X[own][rows], Y[own][rows]) for own in shares if len(X[own][rows])]
            model.train_step([np.concatenate(each) for each in zip(*data, strict=True)])
    return [*model.first.get_weights(), *model.second.get_weights()]


@pytest.mark.costly
@pytest.mark.ranks(2)
@pytest.mark.parametrize("tape", [False, True], ids=["optimizers", "tapes"])
@pytest.mark.parametrize("counts", [(0, 4), (4, 1)], ids=str)
def test_two_optimizers_one_of_which_has_no_step_on_a_rank(ranks: Any, counts: tuple[int, int], tape: bool) -> None:
    """The second one steps in every third batch, so it makes its first step where the other rank has run out of data."""

    def check() -> None:
        rank = hvd.rank()
        shares = [np.arange(32 * r, 32 * r + 4 * count) for r, count in enumerate(counts)]
        model = Pair(3, (lambda each: each) if tape else hvd.DistributedOptimizer, tape)
        model.compile(run_eagerly=True)
        for epoch in range(2):
            data = tf.data.Dataset.from_tensor_slices((X[shares[rank]], Y[shares[rank]])).batch(4)
            model.batches = epoch * max(counts)  # the same step on all ranks
            model.fit(data, verbose=0, callbacks=[hvd.callbacks.Distributed()])
        own = [*model.first.get_weights(), *model.second.get_weights()]
        for got, expected in zip(own, one_process(shares, 3, 2), strict=True):
            assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)
        slots = [v.numpy() for each in (model.first_optimizer, model.second_optimizer) for v in each.variables]
        for other in hvd.allgather_object([*own, *slots]):
            assert all(np.array_equal(a, b) for a, b in zip([*own, *slots], other, strict=True))

    ranks(check)


@pytest.mark.costly
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("embedding", (0, 3)),
        ("LossScaleOptimizer", (3, 1)),
        ("accumulating", (0, 3)),
        ("accumulating embedding", (3, 2)),
        ("MultiOptimizer", (3, 1)),
    ],
    ids=str,
)
def test_optimizers_where_a_rank_has_fewer_batches(
    ranks: Any, counts: tuple[int, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs. Accumulation leaves a rest at the end of an epoch, which the next one goes on with."""
    tokens = np.array([[1, 2], [3, 1], [5, 5], [0, 2], [7, 1], [4, 3], [2, 2], [6, 0], [1, 1], [3, 4], [5, 6], [0, 0]])
    targets = np.arange(48.0).reshape(12, 4) / 48

    def optimizer() -> Any:
        sgd = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2 if "accumulating" in kind else None)
        if kind == "LossScaleOptimizer":
            return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=2.0**10)
        if kind == "MultiOptimizer":
            inside = {".*dense.*": keras.optimizers.Adam(0.01)}
            return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd, inside))
        return sgd

    def make(wrap: Any) -> Any:
        layers = [keras.layers.Embedding(8, 2), keras.layers.Flatten()] if "embedding" in kind else []
        model = keras.Sequential([keras.layers.Input((2,)), *layers, keras.layers.Dense(4)])
        values = np.random.default_rng(1)
        model.set_weights([values.standard_normal(weight.shape) * 0.3 for weight in model.weights])
        model.compile(wrap(optimizer()), "mse", metrics=["mae"])
        return model

    # An update of two batches that a rank has only the first of.
    loses = kind.startswith("accumulating") and counts != (0, 3)
    warned: list[str] = []
    monkeypatch.setattr(own_variables.warnings, "warn", lambda text, *_, **__: warned.append(text))

    def check() -> None:
        rank = hvd.rank()
        shares = [slice(6 * r, 6 * r + 2 * count) for r, count in enumerate(counts)]
        model = make(hvd.DistributedOptimizer)
        data = tf.data.Dataset.from_tensor_slices((tokens[shares[rank]], targets[shares[rank]])).batch(2)
        model.fit(data, epochs=4, verbose=0, callbacks=[hvd.callbacks.Distributed()])
        own = [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]
        for other in hvd.allgather_object(own):
            assert all(np.array_equal(a, b) for a, b in zip(own, other, strict=True))
        if loses:
            return  # batches of one rank; no one process does that
        alone = make(lambda each: each)
        for _ in range(4):
            for number in range(max(counts)):
                rows = [np.arange(12)[own][2 * number : 2 * number + 2] for own in shares]
                alone.train_on_batch(tokens[np.concatenate(rows)], targets[np.concatenate(rows)])
        for got, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
            assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)

    sizes = ranks(lambda: check() or hvd.size())
    told = any("ran out of data between two updates, with gradient_accumulation_steps" in text for text in warned)
    assert told == (loses and len(sizes) == 2 and (not UNDER_MPI or hvd.rank() == 0))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("held", [False, True], ids=["alone", "after another"])
def test_the_rank_that_went_furthest_counts(ranks: Any, monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    """The third batch of one rank is only added up, so it may be there first and wait for the other one, which had two.

    What the other one did with an optimizer that the first has dropped since does not count.
    """
    arrived = threading.Event()
    begin_join = Engine.begin_join

    def in_this_order(engine: Engine) -> Handle[int]:
        if engine.rank == 0:
            arrived.set()
        elif not UNDER_MPI:
            assert arrived.wait(30)
        return begin_join(engine)

    def check() -> None:
        rank = hvd.rank()
        variable = keras.Variable(np.ones(1, np.float32))
        earlier = hvd.DistributedOptimizer(keras.optimizers.SGD())
        for _ in range(10 * held):
            earlier.apply([tf.ones(1)], [variable])
        if rank == 0:
            del earlier
            gc.collect()
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.set_weights([np.array([[1.0]])])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)), "mse")
        for rows in (3 - rank, 1):  # gradients of 2 each; the third one of the first rank waits for another
            data = tf.data.Dataset.from_tensor_slices((np.ones((rows, 1)), np.zeros((rows, 1)))).batch(1)
            model.fit(data, verbose=0, shuffle=False, callbacks=[hvd.callbacks.Distributed()])
            arrived.clear()
        assert int(model.optimizer._iterations) == 4
        # After the first update the weight is 0, so all that follows is 0.
        assert model.get_weights()[0] == pytest.approx(np.zeros((1, 1)))

    monkeypatch.setattr(Engine, "begin_join", in_this_order)
    ranks(check)
