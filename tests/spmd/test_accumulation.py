"""What is a rank's own (gradients that it adds up for its next update) is not overwritten by joins, starts and checkpoints.

The truth is one process with the joined batches, for every optimizer of Keras.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.testing import on_ranks
from hvdlite_tf.gradients.own_variables import own_of, sums_of
from hvdlite_tf.variables import plain_variable
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: ranks that are threads share TensorFlow's pool.
    tf.config.threading.set_inter_op_parallelism_threads(8)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*ran out of data", "ignore:.*shuffle=True"),
    pytest.mark.usefixtures("fresh_world"),
]

BATCH, MOST = 2, 4
_rng = np.random.default_rng(5)
X = _rng.standard_normal((MOST, MOST, BATCH, 6)).astype("float32")  # of rank, of step
Y = _rng.standard_normal((MOST, MOST, BATCH, 2)).astype("float32")

_WRAPPERS = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"}
CLASSES = sorted(
    name
    for name, kind in vars(keras.optimizers).items()
    if inspect.isclass(kind) and issubclass(kind, keras.optimizers.Optimizer) and name not in _WRAPPERS
)


def settings(name: str) -> dict[str, Any]:
    return {"use_ema": True, "ema_momentum": 0.5, "clipnorm": 0.3} if name == "Adam" else {}


def make(name: str, steps: int, **options: Any) -> Any:
    return getattr(keras.optimizers, name)(0.05, gradient_accumulation_steps=steps, **settings(name), **options)


def model_of(optimizer: Any, **options: Any) -> Any:
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])
    values = np.random.default_rng(1)
    model.set_weights([values.standard_normal(each.shape) * 0.5 for each in model.weights])
    model.compile(optimizer, "mse", **options)
    return model


def step(model: Any, xs: Any, ys: Any) -> None:
    """As `fit` makes one; eager, because many optimizers are tried."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(xs) - ys) ** 2)
    weights = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, weights), weights)


def one_process(name: str, steps: int, epochs: list[list[int]], make: Callable[..., Any] = make, **options: Any) -> Any:
    """Each pass with the joined batches of the ranks that have one.

    Args:
        epochs: For each epoch, how many batches each rank has.
    """
    model = model_of(make(name, steps, **options))
    for counts in epochs:
        for number in range(max(counts)):
            there = [rank for rank, count in enumerate(counts) if number < count]
            step(model, np.concatenate(X[there, number]), np.concatenate(Y[there, number]))
    return model


def assert_same(model: Any, truth: Any) -> None:
    """All weights and variables of the optimizer, and of what each rank has for itself the mean over the ranks."""
    for got, expected in zip(model.get_weights(), truth.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-5)
    own = {id(each) for each in own_of(model.optimizer)}
    for here, there in zip(model.optimizer.variables, truth.optimizer.variables, strict=True):
        value = here.numpy()
        if id(here) in own:
            value = hvd.allreduce(tf.constant(value)).numpy()
        np.testing.assert_allclose(value, there.numpy(), rtol=2e-3, atol=2e-5, err_msg=here.path)


@pytest.mark.costly
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("name", CLASSES)
def test_a_join_in_the_middle_of_an_update(ranks: Any, name: str) -> None:
    """Nobody has missed a pass, so each rank keeps its own sum; all other variables are those of one process."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        model = model_of(hvd.DistributedOptimizer(make(name, 2)))
        counts = [[3] * size, [3] * size]
        for epoch, (each, *_) in enumerate(counts):
            for number in range(each):
                step(model, X[rank, number], Y[rank, number])
            before = [np.array(each) for each in sums_of(model.optimizer)]
            hvd.join()
            for here, value in zip(sums_of(model.optimizer), before, strict=True):
                np.testing.assert_array_equal(here.numpy(), value)
            assert_same(model, one_process(name, 2, counts[: epoch + 1]))

    ranks(check)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize(
    ("steps", "epochs"),
    [
        (2, [[3, 2], [3, 3]]),
        (3, [[4, 3], [2, 2]]),
        (2, [[3, 0], [3, 3]]),
        (2, [[1, 0], [3, 3]]),
        (3, [[1, 1], [1, 0], [4, 4]]),
    ],
    ids=str,
)
def test_ranks_that_miss_passes(ranks: Any, steps: int, epochs: list[list[int]]) -> None:
    """If the ranks with a sum have the same passes in it, the ranks go on as one process does."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        counts = [[each[min(r, 1)] for r in range(size)] for each in epochs]
        model = model_of(hvd.DistributedOptimizer(make("Adam", steps)), run_eagerly=True)
        model.optimizer.build(model.trainable_variables)
        for own in counts:
            for number in range(own[rank]):
                step(model, X[rank, number], Y[rank, number])
            hvd.join()
        if (
            steps == 3 and len(epochs) == 3
        ):  # no one process has sums of different passes: only all weights are the same
            for other in hvd.allgather_object(model.get_weights()):
                assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), other, strict=True))
        else:
            assert_same(model, one_process("Adam", steps, counts))

    ranks(check)


def fit(model: Any, rank: int, epochs: int, callbacks: Any) -> None:
    x, y = X[rank, :3].reshape(-1, 6), Y[rank, :3].reshape(-1, 2)
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)


@pytest.mark.costly
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("how", ["Distributed", "UnevenDataCallback", "fit twice", "checkpoint", "KerasState"])
def test_fit_in_the_middle_of_an_update(ranks: Any, how: str, tmp_path: Path) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        model = model_of(hvd.DistributedOptimizer(make("Adam", 2)))
        if how in ("Distributed", "UnevenDataCallback"):
            fit(model, rank, 2, [getattr(hvd.callbacks, how)()])
        elif how == "fit twice":
            for _ in range(2):
                fit(model, rank, 1, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        else:
            fit(model, rank, 1, [])
            folder = hvd.broadcast_object(str(tmp_path))
            state = hvd.elastic.KerasState(model)
            if how == "checkpoint":
                hvd.checkpoint.save(folder, model=model)
                model = model_of(hvd.DistributedOptimizer(make("Adam", 2)))
                hvd.checkpoint.load(folder, model=model)
            else:
                state.commit()
                fit(model, rank, 1, [])
                state.restore()
                state.sync()
            fit(model, rank, 1, [])
        alone = model_of(make("Adam", 2))
        joined = [np.moveaxis(each[:size, :3], 0, 1).reshape(-1, each.shape[-1]) for each in (X, Y)]
        for epochs in [2] if how in ("Distributed", "UnevenDataCallback") else [1, 1]:  # the end of `fit` counts
            alone.fit(*joined, batch_size=BATCH * size, epochs=epochs, shuffle=False, verbose=0)
        assert_same(model, alone)

    ranks(check)


@pytest.mark.skipif(UNDER_MPI, reason="other numbers of ranks load than have saved")
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=str)
@pytest.mark.parametrize("kind", ["plain", "shard", "one process"])
def test_checkpoints_of_sums_for_other_numbers_of_ranks(tmp_path: Path, op: Any, kind: str) -> None:
    """Saved in the middle of an update by 2 ranks, of which each has its sum; the update is that of one process."""
    options = {} if kind == "one process" else {"op": op, "shard": kind == "shard"}
    batches = X[:2, 0], Y[:2, 0]

    def made(wrapped: bool = True) -> Any:
        optimizer = make("SGD", 2)
        return model_of(hvd.DistributedOptimizer(optimizer, **options) if wrapped and options else optimizer)

    def saved() -> None:
        model = model_of(hvd.DistributedOptimizer(make("SGD", 2), op=op))
        step(model, *(each[hvd.rank()] for each in batches))
        hvd.checkpoint.save(str(tmp_path), model=model)

    def loaded() -> list[Any]:
        model = made()
        hvd.checkpoint.load(str(tmp_path), model=model)
        weights = model.trainable_variables
        model.optimizer.apply([tf.zeros(each.shape) for each in weights], weights)
        return list(model.get_weights())

    on_ranks(2, saved)
    alone = model_of(make("SGD", 2))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((alone(np.concatenate(batches[0])) - np.concatenate(batches[1])) ** 2)
    gradients = tape.gradient(loss, alone.trainable_variables)
    expected = [
        each.numpy() - 0.05 * gradient.numpy() / 2 * (2 if op is hvd.Sum else 1)
        for each, gradient in zip(alone.trainable_variables, gradients, strict=True)
    ]
    for size in (1,) if kind == "one process" else (1, 2, 3):
        for weights in on_ranks(size, loaded):
            for got, wanted in zip(weights, expected, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_broadcasts_leave_each_rank_its_sums(ranks: Any) -> None:
    def check() -> None:
        variable = keras.Variable([float(hvd.rank())])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2))
        optimizer.apply([tf.constant([1.0 + hvd.rank()])], [variable])
        (own,) = sums_of(optimizer)
        everything = [variable, *optimizer.variables]
        for share in (hvd.broadcast_variables, lambda given: hvd.elastic.TensorFlowState(variables=given).sync()):
            share(everything)
            share([plain_variable(each) for each in everything])
            assert own.numpy().tolist() == [1.0 + hvd.rank()]
        assert variable.numpy().tolist() == [0.0]

    ranks(check)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*shuffle=True")
@pytest.mark.parametrize("bare", [False, True])
def test_uneven_passes_of_tf_keras(ranks: Any, bare: bool) -> None:
    """After an epoch with uneven data the ranks exchange in the same passes again, so the next one is as in a new job."""
    tf_keras = pytest.importorskip("tf_keras", reason="tf_keras is not installed")

    def check() -> None:
        model = tf_keras.Sequential(
            [tf_keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", input_shape=(1,))]
        )
        optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(0.1), backward_passes_per_step=2)
        model.compile(
            optimizer, lambda y, p: tf.reduce_mean(y * p), run_eagerly=True
        )  # the gradient is that of the data
        y = np.array([1.0, 2.0, 4.0, 8.0, 16.0])[: 5 - 3 * hvd.rank()] * (1 + hvd.rank())
        seen = []
        for _ in range(2):
            before = model.get_weights()[0].item()
            callbacks = [] if bare else [hvd.callbacks.UnevenDataCallback()]
            model.fit(np.ones((len(y), 1)), y, batch_size=1, shuffle=False, verbose=0, callbacks=callbacks)
            if bare:
                hvd.join()
            seen.append(before - model.get_weights()[0].item())
        # One update of both ranks with the passes 1 and 2, and one with 3 and 4, of rank 0 alone; rank 0's fifth is left out.
        np.testing.assert_allclose(seen, [0.1 * ((3 + 6) / 2 + 12)] * 2, rtol=1e-5)

    ranks(check)
