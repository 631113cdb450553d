"""What changes the loss of `fit`, or what it trains: with a distributed optimizer and the strategy, against one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite_tf.strategy import Strategy
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: ranks that are threads share TensorFlow's pool.
    tf.config.threading.set_inter_op_parallelism_threads(8)

ROWS, STEPS = 12, 3
_rng = np.random.default_rng(4)
X = _rng.standard_normal((STEPS, ROWS, 4))
Y = _rng.integers(0, 3, (STEPS, ROWS))
WEIGHTS = _rng.random((STEPS, ROWS)) * 2
TOKENS = _rng.integers(0, 7, (STEPS, ROWS, 4))

CROSSENTROPY = "sparse_categorical_crossentropy"


class Penalty(keras.layers.Layer):  # type: ignore[misc]  # mypy does not see Keras
    """Adds the mean of what comes through to the loss."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def of_the_second_class(y: Any, predictions: Any) -> Any:
    """A loss of the program's own: one number for each row."""
    return keras.ops.square(keras.ops.cast(y == 1, predictions.dtype) - predictions[:, 1])


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        before, after: The layers around the first dense one; the latter for a job of several ranks, and for one process.
        regularizer: Of the first dense layer.
        loss: As for `compile`.
        optimizer: Makes it.
        options: For `fit`.
        x: The rows of all batches.
        weighted: Each row has a weight.
        lora: The first dense layer is adapted, and nothing else of it trained.
        dtype: Of the model.
    """

    before: Callable[[], list[Any]] = list
    after: Callable[[bool], list[Any]] = lambda distributed: []
    regularizer: str | None = None
    loss: Any = CROSSENTROPY
    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.3, momentum=0.9)
    options: dict[str, Any] = field(default_factory=dict)
    x: Any = None
    weighted: bool = False
    lora: bool = False
    dtype: str = "float32"


def normalization(distributed: bool) -> list[Any]:
    return [hvd.SyncBatchNormalization() if distributed else keras.layers.BatchNormalization(synchronized=True)]


def not_finite() -> Any:
    rows = X.copy()
    rows[1, -1] = np.nan  # of the second batch, on the last rank
    return rows


CASES = {
    "weights of rows": Case(weighted=True),
    "weights of classes": Case(options={"class_weight": {0: 1.0, 1: 3.0, 2: 0.25}}),
    "a loss of its own": Case(loss=of_the_second_class, weighted=True),
    "a loss that a layer adds": Case(after=lambda _: [Penalty()]),
    "a regularizer": Case(regularizer="l2"),
    "a synchronized normalization": Case(after=normalization),
    "an embedding": Case(before=lambda: [keras.layers.Embedding(7, 2), keras.layers.Flatten()], x=TOKENS),
    "an embedding and Adam": Case(
        before=lambda: [keras.layers.Embedding(7, 2), keras.layers.Flatten()],
        optimizer=lambda: keras.optimizers.Adam(0.05),
        x=TOKENS,
    ),
    "an adapter": Case(lora=True, optimizer=lambda: keras.optimizers.Adam(0.05)),
    "float64": Case(dtype="float64", optimizer=lambda: keras.optimizers.Adam(0.05)),
    "NaN": Case(x=not_finite()),
    "NaN and a scaled loss": Case(
        x=not_finite(),
        optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.05), initial_scale=8.0),
    ),
}


def make(case: Case, wrap: Callable[[Any], Any]) -> Any:
    """The same model on every rank."""
    dense = keras.layers.Dense(5, "tanh", kernel_regularizer=case.regularizer, dtype=case.dtype)
    layers = [*case.before(), dense, *case.after(wrap is not same), keras.layers.Dense(3, "softmax", dtype=case.dtype)]
    model = keras.Sequential([keras.layers.Input((4,), dtype=case.dtype), *layers])
    values = np.random.default_rng(5)
    if case.lora:
        dense.enable_lora(2)
    model.set_weights([values.standard_normal(weight.shape) * 0.4 for weight in model.weights])
    model.compile(wrap(case.optimizer()), case.loss, weighted_metrics=["accuracy"])
    return model


def fit(case: Case, model: Any, rank: int = 0, size: int = 1, **options: Any) -> tuple[np.ndarray, list[float]]:
    """Trains with this rank's rows of each batch. Returns all weights, and the losses of the epochs."""
    own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    x = X if case.x is None else case.x
    x, y, weights = (each[:, own].reshape(-1, *each.shape[2:]) for each in (x, Y, WEIGHTS))
    history = model.fit(
        *(x, y),
        sample_weight=weights if case.weighted else None,
        batch_size=ROWS // size,
        epochs=3,
        shuffle=False,
        verbose=0,
        **case.options,
        **options,
    )
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()]), history.history["loss"]


def same(optimizer: Any) -> Any:
    """What one process compiles with."""
    return optimizer


def assert_alike(found: tuple[np.ndarray, list[float]], truth: tuple[np.ndarray, list[float]], wide: bool) -> None:
    tolerance = 1e-6 if wide else 2e-4  # Keras computes losses in float32 in any model
    assert found[0] == pytest.approx(truth[0], rel=tolerance, abs=tolerance, nan_ok=True)
    assert found[1] == pytest.approx(truth[1], rel=2e-4, nan_ok=True)


@functools.cache
def trained_alone(name: str) -> tuple[np.ndarray, list[float]]:
    """What one process comes to."""
    return fit(CASES[name], make(CASES[name], same))


@pytest.mark.costly
@pytest.mark.parametrize("way", ["optimizer", "strategy"])
@pytest.mark.parametrize("name", CASES if not UNDER_MPI else ["weights of rows", "NaN and a scaled loss"])
def test_fit(ranks: Any, name: str, way: str) -> None:
    """Two ranks tell it all. As processes they differ in the exchange only, so that two of the programs do there."""
    if ranks(hvd.size)[0] != 2:
        return
    case = CASES[name]
    truth = trained_alone(name)
    assert np.isnan(truth[0]).any() == (name == "NaN")

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        if way == "optimizer":
            model = make(case, hvd.DistributedOptimizer)
            found = fit(case, model, rank, size, callbacks=[hvd.callbacks.Distributed()])
        else:
            with Strategy().scope():
                model = make(case, same)
            found = fit(case, model)  # it shares the rows of each batch out
        assert_alike(found, truth, case.dtype == "float64")
        assert all(np.array_equal(found[0], other, equal_nan=True) for other in hvd.allgather_object(found[0]))

    ranks(check)


def test_fit_of_a_process_set(ranks: Any) -> None:
    """Two of three ranks train, and the third one does something else meanwhile."""
    if ranks(hvd.size)[0] != 3:
        return
    case = CASES["weights of rows"]
    truth = trained_alone("weights of rows")

    def check() -> None:
        pair = hvd.add_process_set([0, 2])
        if pair.included():
            model = make(case, lambda optimizer: hvd.DistributedOptimizer(optimizer, process_set=pair))
            distributed = hvd.callbacks.Distributed(process_set=pair)
            assert_alike(fit(case, model, pair.rank(), 2, callbacks=[distributed]), truth, False)
        else:
            model = make(case, same)
            assert_alike(fit(case, model), truth, False)
        hvd.barrier()
        hvd.remove_process_set(pair)

    ranks(check)


def fit_sparse(wrap: Callable[[Any], Any], rank: int = 0, size: int = 1, **options: Any) -> np.ndarray:
    """Train a dense layer on sparse rows, whose gradient has each row of its kernel once."""
    rows = np.where(np.random.default_rng(6).random((32, 9)) > 0.7, 1.5, 0.0).astype("float32")[rank::size]
    layer = keras.layers.Dense(3, kernel_initializer=keras.initializers.Constant(0.2))
    model = keras.Sequential([keras.layers.Input((9,), sparse=True), layer])
    model.compile(wrap(keras.optimizers.Adam(0.02)), "mse")
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(rows), np.ones((len(rows), 3), "float32")))
    model.fit(data.batch(8 // size), epochs=2, shuffle=False, verbose=0, **options)
    kernel: np.ndarray = model.get_weights()[0]
    return kernel


@pytest.mark.ranks(2)
def test_rows_that_come_once_on_each_rank_are_added_up(ranks: Any) -> None:
    """Adam squares rows one by one, and in one process each comes once."""
    truth = fit_sparse(same)

    def check() -> None:
        callbacks = [hvd.callbacks.Distributed()]
        found = fit_sparse(hvd.DistributedOptimizer, hvd.rank(), hvd.size(), callbacks=callbacks)
        assert found == pytest.approx(truth, abs=1e-5)

    ranks(check)
