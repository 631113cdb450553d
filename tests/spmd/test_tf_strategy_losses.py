"""Losses under `hvd.Strategy`: those of Keras, however reduced, masked and weighted, on any shares, are those of one process.

A model has an output, and a weight of its own, for each loss and reduction, so that one step shows all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.errors import ArgumentError
from hvdlite_tf.strategy import Strategy
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: a thread of TensorFlow's for each rank that waits.
    tf.config.threading.set_inter_op_parallelism_threads(8)

ROWS, STEPS, CLASSES = 7, 3, 4
SHARES = {"even": {2: [4, 3], 3: [3, 2, 2]}, "uneven": {2: [2, 5], 3: [1, 4, 2]}, "none": {2: [7, 0], 3: [3, 4, 0]}}
_rng = np.random.default_rng(7)
X = _rng.standard_normal((ROWS, STEPS, CLASSES)).astype("float32")
LABELS = _rng.integers(0, CLASSES, (ROWS, STEPS))
MASK = np.arange(STEPS) < np.array([1, 3, 2, 3, 1, 1, 2])[:, None]
WEIGHTS = (_rng.random((ROWS, STEPS)) * 3).astype("float32")
CASES = [
    (True, False, "none"),
    (False, True, "uneven"),
    (True, True, "none"),
    (False, False, "none"),
    (True, True, "uneven"),
]
"""Whether steps are masked, whether they are weighted, and how the ranks share the rows."""


def own_of_the_batch(y_true: Any, y_pred: Any) -> Any:
    """One number for a batch that is no mean over its rows."""
    return keras.ops.sqrt(keras.ops.sum(keras.ops.square(y_true - y_pred)))


def own_of_rows(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.sum(keras.ops.square(y_true - y_pred), axis=-1)


def losses_of(library: Any) -> dict[str, tuple[str, Callable[..., Any]]]:
    """For each loss the kind of its labels, and what makes it of a reduction."""
    kinds = library.losses
    names = [
        *("MeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanSquaredLogarithmicError"),
        *(
            "CosineSimilarity",
            "Huber",
            "LogCosh",
            "Hinge",
            "SquaredHinge",
            "CategoricalHinge",
            "KLDivergence",
            "Poisson",
        ),
        *("BinaryCrossentropy", "BinaryFocalCrossentropy", "CategoricalCrossentropy", "CategoricalFocalCrossentropy"),
    ]
    if library is keras:
        names += ["Dice", "Tversky", "CategoricalGeneralizedCrossEntropy"]
    found = {name: ("bits", getattr(kinds, name)) for name in names}
    sparse = kinds.SparseCategoricalCrossentropy
    found["SparseCategoricalCrossentropy"] = "classes", sparse
    found["ignore_class"] = "classes", functools.partial(sparse, ignore_class=2)
    if library is keras:
        found["CategoricalGeneralizedCrossEntropy"] = "classes", kinds.CategoricalGeneralizedCrossEntropy
        found["Circle"] = "vectors", kinds.Circle
        found["CTC"] = "texts", kinds.CTC
        known = {each.__name__ for _, each in found.values() if isinstance(each, type)}
        there = {name for name in dir(kinds) if isinstance(getattr(kinds, name), type)}
        assert there - known == {"Loss"}  # a new loss of Keras is a new line here
    return found


def labels_of(kind: str) -> np.ndarray:
    bits = np.eye(CLASSES, dtype="float32")[LABELS]
    return {"bits": bits, "classes": LABELS, "vectors": LABELS[:, 0], "texts": np.maximum(LABELS[:, :1], 1)}[kind]


ALONE = {
    "not reduced": ("classes", keras.losses.SparseCategoricalCrossentropy(ignore_class=2, reduction="none")),
    "over rows": ("bits", keras.losses.CosineSimilarity(axis=0)),
}
"""What Keras refuses beside other losses, or weights."""


def make_model(library: Any, everything: bool, alone: str = "") -> Any:
    """A model with an output for each loss; for some, or all, one for each reduction. Or one for a loss, if it is named."""
    reductions = ["sum_over_batch_size", "sum", *(["mean_with_sample_weight"] if library is keras else [])]
    cases: dict[str, Any] = {}
    for number, (name, (kind, make)) in enumerate(losses_of(library).items()):
        some = reductions if everything or name in ("MeanSquaredError", "ignore_class") else [reductions[number % 2]]
        for reduction in some:
            cases[f"{name}_{reduction}"] = kind, make(reduction=reduction)
    if alone:
        cases = {alone: ALONE[alone]}
    elif library is keras:
        cases |= {function.__name__: ("bits", function) for function in (own_of_the_batch, own_of_rows)}

    class Outputs(library.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.masks = False
            make: Any = functools.partial(self.add_weight, shape=(CLASSES,), initializer="zeros")
            self.places = {name: make(name=f"of_{name}") for name in cases}

        def call(self, inputs: Any) -> Any:
            outputs = {}
            for name, (kind, _) in cases.items():
                output = tf.nn.softmax(inputs["x"] + tf.convert_to_tensor(self.places[name]))
                output = output[:, 0] if kind == "vectors" else output
                if self.masks and kind in ("bits", "classes"):
                    output._keras_mask = inputs["mask"]
                outputs[name] = output
            return outputs[name] if alone else outputs

    model = Outputs()
    losses = {name: loss for name, (_, loss) in cases.items()}
    model.compile(library.optimizers.SGD(0.5), only(losses) if alone else losses, run_eagerly=True)
    model.kinds = {name: kind for name, (kind, _) in cases.items()}
    return model


def only(values: dict[str, Any]) -> Any:
    (value,) = values.values()
    return value


def data_of(model: Any, rows: slice, weighted: bool) -> tuple[Any, Any, Any]:
    """The inputs, labels and weights of some rows."""
    labels = {name: labels_of(kind)[rows] for name, kind in model.kinds.items()}
    weights = {
        name: (WEIGHTS if kind in ("bits", "classes") else WEIGHTS[:, 0])[rows] for name, kind in model.kinds.items()
    }
    pick = only if len(labels) == 1 else dict
    return {"x": X[rows], "mask": MASK[rows]}, pick(labels), pick(weights) if weighted else None


def stepped(model: Any, rows: slice, masked: bool, weighted: bool) -> dict[str, np.ndarray]:
    """What a test, and then a step of training, leave behind."""
    model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
    model.masks = masked
    model.reset_metrics()
    found = {f"tested {name}": value for name, value in evaluated(model, rows, weighted).items()}
    model.reset_metrics()
    trained = model.train_on_batch(*data_of(model, rows, weighted), return_dict=True)
    found |= {f"trained {name}": value for name, value in trained.items()}
    return {name: np.array(value) for name, value in {**found, **model.places}.items()}


def evaluated(model: Any, rows: slice, weighted: bool) -> dict[str, Any]:
    found: dict[str, Any] = model.test_on_batch(*data_of(model, rows, weighted), return_dict=True)
    return found


def rows_of(library: Any, share: str, size: int) -> tuple[slice, list[slice]]:
    """The rows of one process, and those that each rank gives to `train_on_batch`. tf_keras shares them out itself."""
    if library is not keras:
        every = slice(0, size - 1) if share == "none" else slice(0, ROWS)
        return every, [every] * size
    ends = np.cumsum(SHARES[share][size])
    return slice(0, ROWS), [slice(end - rows, end) for end, rows in zip(ends, SHARES[share][size], strict=True)]


def compare(ranks: Any, library: Any, cases: list[tuple[bool, bool, str]], make: Any) -> None:
    """Run a model on all rows in one process, and under a strategy on what each rank has of them."""
    size = ranks(hvd.size)[0]
    model = make()
    truth = {case: stepped(model, rows_of(library, case[2], size)[0], *case[:2]) for case in cases}

    def check() -> None:
        with Strategy().scope():
            model = make()
        evaluated(model, slice(0, ROWS), False)  # builds it; Keras cannot build every loss of no rows
        for case, expected in truth.items():
            found = stepped(model, rows_of(library, case[2], size)[1][hvd.rank()], *case[:2])
            assert found.keys() == expected.keys()
            wrong = {
                name: (found[name].tolist(), value.tolist())
                for name, value in expected.items()
                if not np.allclose(found[name], value, rtol=3e-4, atol=3e-6)
            }
            assert not wrong, case

    ranks(check)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_all_losses(ranks: Any, library: str, pytestconfig: pytest.Config) -> None:
    kind, everything = pytest.importorskip(library), pytestconfig.option.everything
    cases = [(m, w, rows) for m in (False, True) for w in (False, True) for rows in SHARES] if everything else CASES
    cases = cases if everything or library == "keras" else CASES[2:4]
    compare(ranks, kind, cases, lambda: make_model(kind, everything))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "cases"), [("not reduced", CASES), ("over rows", [(False, False, "none")])])
def test_one_loss(ranks: Any, name: str, cases: Any) -> None:
    compare(ranks, keras, cases, lambda: make_model(keras, False, name))


class Adds(keras.layers.Layer):  # type: ignore[misc]  # mypy does not see Keras
    """Adds the mean of what comes through to the loss, as a variational autoencoder does."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.3 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


class AddsSum(keras.layers.Layer):  # type: ignore[misc]
    """Adds a sum over rows."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.3 * keras.ops.sum(keras.ops.square(inputs)))
        return inputs


class OwnLoss(keras.Model):  # type: ignore[misc]
    """Computes its loss itself: a mean, and one of Keras' losses that hides rows."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        hidden = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")(y, y_pred, keras.ops.abs(y[:, 0]))
        return keras.ops.mean(keras.ops.abs(y_pred - y)) + hidden + super().compute_loss(x, y, y_pred, sample_weight)


class OwnStep(keras.Model):  # type: ignore[misc]
    """Has a step of its own, with a sum that it divides by the rows of a global batch."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = keras.losses.MeanSquaredError(reduction="sum")(y, predictions) / 4
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights, strict=True)
        )
        return self.compute_metrics(x, y, predictions)


def dense(units: int, **options: Any) -> Any:
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.Constant(0.3), **options)


def layers_of(kind: str) -> tuple[type[Any], list[Any]]:
    normalization = keras.layers.BatchNormalization(trainable=False)
    return {
        "added": (keras.Model, [dense(3), Adds(), dense(2)]),
        "own activity": (
            keras.Model,
            [dense(3, activity_regularizer="l2"), dense(3, activity_regularizer=own_of_activity), dense(2)],
        ),
        "normalization": (keras.Model, [dense(3), normalization, dense(2)]),
        "own loss": (OwnLoss, [dense(2)]),
        "own step": (OwnStep, [dense(2)]),
    }[kind]


@keras.saving.register_keras_serializable()  # type: ignore[untyped-decorator]
def own_of_activity(output: Any) -> Any:
    return keras.ops.sqrt(keras.ops.sum(keras.ops.square(output)))


def fitted(kind: str, eager: bool) -> dict[str, Any]:
    """What `fit` leaves behind of a model; its last batch has one row, so that other ranks have none."""
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((9, 2)).astype("float32"), rng.standard_normal((9, 2)).astype("float32")
    make, layers = layers_of(kind)
    inputs = output = keras.Input((2,))
    for layer in layers:
        output = layer(output)
    model = make(inputs, output)
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], run_eagerly=eager)
    history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0, validation_data=(x[:5], y[:5])).history
    return {**history, **{f"weight {place}": weight for place, weight in enumerate(model.get_weights())}}


@pytest.mark.costly
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["added", "own activity", "normalization", "own loss", "own step"])
def test_fit(ranks: Any, kind: str) -> None:
    eager = kind not in ("added", "own loss")
    expected = fitted(kind, eager)

    def check() -> None:
        with Strategy().scope():
            found = fitted(kind, eager)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name

    ranks(check)


@pytest.mark.ranks(2)
def test_a_sum_over_rows_is_refused(ranks: Any) -> None:
    def check() -> None:
        with Strategy().scope():
            model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1), AddsSum()])
            model.compile("sgd", "mse")
        with pytest.raises(ArgumentError, match="a sum over this rank's rows .* let it be a mean"):
            model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=4, verbose=0)

    ranks(check)


@pytest.mark.ranks(2)
def test_a_sum_that_is_divided_by_the_known_number_of_rows_is_a_mean(ranks: Any) -> None:
    """Keras divides what an activity regularizer returns by the number of rows, a constant where all batches are even."""

    def fit() -> np.ndarray:
        ones = {"kernel_initializer": "ones", "activity_regularizer": "l2"}
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, **ones)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(X[:6, 0, :2], X[:6, 0, :1], batch_size=2, shuffle=False, verbose=0)
        return np.concatenate([each.ravel() for each in model.get_weights()])

    expected = fit()

    def check() -> None:
        with Strategy().scope():
            assert fit() == pytest.approx(expected, rel=1e-5)

    ranks(check)


@pytest.mark.costly
@pytest.mark.ranks(2)
def test_a_step_of_ones_own_in_tf_keras(ranks: Any) -> None:
    """It calls `compiled_loss`, which divides by the number of ranks itself."""
    library = pytest.importorskip("tf_keras")

    class Own(library.Model):  # type: ignore[misc, name-defined]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                predictions = self(x, training=True)
                loss = self.compiled_loss(y, predictions)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {each.name: each.result() for each in self.metrics}

    def fit() -> tuple[float, np.ndarray]:
        inputs = library.Input((STEPS, CLASSES))
        model = Own(inputs, library.layers.Dense(CLASSES, "softmax", kernel_initializer="ones")(inputs))
        loss = library.losses.SparseCategoricalCrossentropy(ignore_class=2)
        model.compile(library.optimizers.SGD(0.5), loss, run_eagerly=True)
        history = model.fit(X[:5], LABELS[:5], batch_size=4, shuffle=False, verbose=0).history
        return history["loss"][0], model.get_weights()[1]

    expected = fit()

    def check() -> None:
        with Strategy().scope():
            found = fit()
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == pytest.approx(expected[1], abs=1e-6)

    ranks(check)
