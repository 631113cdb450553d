"""Every metric of Keras, weighted or not, is that of one process: by `callbacks.Distributed`, and under `hvd.Strategy`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite_tf.strategy import Strategy
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: a thread of TensorFlow's for each rank that waits.
    tf.config.threading.set_inter_op_parallelism_threads(8)

ROWS, CLASSES = 23, 3
_rng = np.random.default_rng(8)
X = _rng.standard_normal((ROWS, CLASSES)).astype("float32")
LABELS = _rng.integers(0, CLASSES, ROWS)
WEIGHTS = (_rng.random(ROWS) * 2).astype("float32")
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "IoU": (3, [0, 2]),
    "MeanIoU": (3,),
    "OneHotIoU": (3, [0, 1]),
    "OneHotMeanIoU": (3,),
    "PrecisionAtRecall": (0.4,),
    "RecallAtPrecision": (0.4,),
    "SensitivityAtSpecificity": (0.5,),
    "SpecificityAtSensitivity": (0.5,),
    "SparseTopKCategoricalAccuracy": (2,),
    "TopKCategoricalAccuracy": (2,),
}
OF_CLASSES = ("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy", "SparseTopKCategoricalAccuracy")
LEFT_OUT = ("Metric", "Mean", "Sum", "MeanMetricWrapper", "IoU", "MeanIoU", "Accuracy")
"""They are not of labels and probabilities."""


def labels(classes: bool) -> np.ndarray:
    return LABELS if classes else np.eye(CLASSES, dtype="float32")[LABELS]


@functools.cache
def kinds(classes: bool, weighted: bool) -> list[str]:
    """The metrics of Keras for these labels that Keras itself can compute, with weights or without."""
    found = []
    for name in sorted(dir(keras.metrics)):
        kind = getattr(keras.metrics, name)
        if not isinstance(kind, type) or name in LEFT_OUT or (name in OF_CLASSES) != classes:
            continue
        given = {"sample_weight": WEIGHTS} if weighted else {}
        try:
            kind(*ARGUMENTS.get(name, ())).update_state(labels(classes), np.abs(X), **given)
        except (ValueError, tf.errors.InvalidArgumentError):
            assert weighted, name
            continue
        found.append(name)
    return found


class Largest(keras.metrics.Metric):  # type: ignore[misc]  # mypy does not see Keras
    """The rows of the largest batch: not a sum over rows."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        self.rows.assign(keras.ops.maximum(self.rows, keras.ops.cast(keras.ops.shape(y)[0], "float32")))

    def result(self) -> Any:
        return self.rows + 0


def made(names: list[str], prefix: str = "") -> list[Any]:
    return [getattr(keras.metrics, name)(*ARGUMENTS.get(name, ()), name=prefix + name) for name in names]


def fitted(classes: bool, rows: slice, wrap: Callable[[Any], Any], **options: Any) -> dict[str, Any]:
    """The logs of an epoch that trains nothing, and its validation."""
    model = keras.Sequential([keras.layers.Input((CLASSES,)), keras.layers.Dense(CLASSES, "softmax")])
    model.layers[0].set_weights([np.eye(CLASSES), np.zeros(CLASSES)])
    plain = [*made(kinds(classes, False)), *options.pop("more", [])]
    weighted = made(kinds(classes, True), "weighted_")
    loss = "sparse_categorical_crossentropy" if classes else "mse"
    model.compile(wrap(keras.optimizers.SGD(0.0)), loss, metrics=plain, weighted_metrics=weighted, run_eagerly=True)
    x, y, weights = X[rows], labels(classes)[rows], WEIGHTS[rows]
    history = model.fit(
        *(x, y),
        sample_weight=weights,
        batch_size=8,
        shuffle=False,
        verbose=0,
        validation_data=(x[::2], y[::2], weights[::2]),
        **options,
    ).history
    return {name: np.asarray(values[-1]) for name, values in history.items()}


@pytest.mark.costly
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*lower than 2", "ignore:You are passing weight")
@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.parametrize("way", ["callback", "strategy"])
@pytest.mark.slow
def test_metrics(ranks: Any, way: str, classes: bool) -> None:
    expected = fitted(classes, slice(None), lambda optimizer: optimizer)
    assert len(expected) > (60 if not classes else 12)

    def check() -> None:
        if way == "strategy":
            with Strategy().scope():
                found = fitted(classes, slice(None), lambda optimizer: optimizer)
        else:
            rows = (
                slice(0, 10) if hvd.rank() == 0 else slice(10, None)
            )  # 2 batches, and validation rows as of one process
            callbacks = [hvd.callbacks.Distributed()]
            found = fitted(classes, rows, hvd.DistributedOptimizer, callbacks=callbacks, more=[Largest()])
            assert found.pop("largest") == 8
            found.pop("val_largest")
        assert found.keys() == expected.keys()
        wrong = {
            name: (found[name].tolist(), value.tolist())
            for name, value in expected.items()
            if not np.allclose(found[name], value, rtol=1e-4, atol=1e-6, equal_nan=True)
        }
        assert not wrong

    ranks(check)
