"""What goes wrong quietly in `fit` on several ranks: refused, or told."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.adapter import advice
from hvdlite.api import world
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.testing import on_ranks
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: ranks that are threads share TensorFlow's pool.
    tf.config.threading.set_inter_op_parallelism_threads(8)

_rng = np.random.default_rng(5)
X = _rng.standard_normal((48, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]]).astype("float32")
START = np.array([[0.3], [0.1], [-0.2]], "float32")


def linear(optimizer: Any, package: Any = keras, kind: Any = None, **options: Any) -> Any:
    model = (kind or package.Sequential)([package.layers.InputLayer((3,)), package.layers.Dense(1, use_bias=False)])
    model.set_weights([START])
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def share(rows: int = 16) -> tuple[Any, Any]:
    own = slice(hvd.rank() * rows, (hvd.rank() + 1) * rows)
    return X[own], Y[own]


def fit(model: Any, *callbacks: Any, rows: int = 16, **options: Any) -> Any:
    return model.fit(*share(rows), batch_size=4, shuffle=False, verbose=0, callbacks=list(callbacks), **options)


def same_everywhere(model: Any) -> bool:
    own = model.get_weights()
    return all(
        all(np.array_equal(a, b) for a, b in zip(own, other, strict=True)) for other in hvd.allgather_object(own)
    )


# Different optimizers


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("package", ["keras", "tf_keras"])
@pytest.mark.parametrize("by", ["callback", "first step"])
def test_classes_and_settings_that_differ_are_told(ranks: Any, by: str, package: str) -> None:
    optimizers = importlib.import_module(package).optimizers

    def step(optimizer: Any) -> None:
        if by == "callback":
            model = linear(optimizer, importlib.import_module(package))
            fit(model, hvd.BroadcastGlobalVariablesCallback(0), epochs=1)
        else:
            weight = keras.Variable([1.0]) if package == "keras" else tf.Variable([1.0])
            optimizer.apply_gradients([(tf.constant([1.0]), weight)])

    def check() -> None:
        is_last = hvd.rank() == hvd.size() - 1
        different = [
            (optimizers.Adam(0.1) if is_last else optimizers.SGD(0.1), "the optimizer is a (Adam|SGD)"),
            (optimizers.SGD(0.1, clipnorm=0.5 if is_last else 1.0), "clipnorm=(0.5|1.0)"),
            (optimizers.SGD(0.1, momentum=0.5 if is_last else 0.9), "momentum=(0.5|0.9)"),
        ]
        for optimizer, text in different:
            distributed = hvd.DistributedOptimizer(optimizer)
            with pytest.raises(MismatchError, match=f"(?s){text}.*{text}.*Make them alike on all ranks"):
                step(distributed)

    ranks(check)


# A plain optimizer


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("how", ["plain", "text", "compiled again", "LossScaleOptimizer", "on one rank"])
def test_a_plain_optimizer_is_refused(ranks: Any, how: str) -> None:
    def check() -> None:
        optimizer: Any = keras.optimizers.SGD(0.1)
        if how == "text":
            optimizer = "adam"
        elif how == "LossScaleOptimizer":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        elif how == "compiled again" or (how == "on one rank" and hvd.rank() > 0):
            optimizer = hvd.DistributedOptimizer(optimizer)
        model = linear(optimizer, run_eagerly=True)
        if how == "compiled again":
            fit(model, hvd.callbacks.Distributed())
            model.compile(keras.optimizers.SGD(0.1), "mse")
        with pytest.raises(
            ArgumentError, match=r"is not a distributed one.*pass hvd.DistributedOptimizer\(optimizer\)"
        ):
            fit(model, hvd.callbacks.Distributed())

    ranks(check)


class WithTape(keras.Sequential):  # type: ignore[misc]  # mypy does not see Keras
    """Exchanges gradients itself."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class OwnOptimizer(keras.optimizers.SGD):  # type: ignore[misc]
    """Exchanges gradients itself."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply(hvd.grouped_allreduce(list(grads)), trainable_variables)


@pytest.mark.parametrize("how", ["train_step", "optimizer"])
def test_a_program_that_exchanges_itself_is_let_pass(ranks: Any, how: str) -> None:
    def check() -> None:
        optimizer = OwnOptimizer(0.1) if how == "optimizer" else keras.optimizers.SGD(0.1)
        model = linear(optimizer, kind=WithTape if how == "train_step" else None)
        fit(model, hvd.callbacks.Distributed())
        assert same_everywhere(model)

    ranks(check)


@pytest.mark.ranks(3)
def test_other_ranks_than_the_callbacks_are_refused(ranks: Any) -> None:
    def check() -> None:
        some = hvd.add_process_set([0, 1])
        model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=some), run_eagerly=True)
        if hvd.rank() < 2:
            with pytest.raises(ArgumentError, match=r"among ranks \[0, 1\], and the callback is for ranks \[0, 1, 2\]"):
                fit(model, hvd.callbacks.Distributed())
            fit(model, hvd.callbacks.Distributed(process_set=some))
        else:
            with pytest.raises(ArgumentError, match=r"On ranks 0, 1: the optimizer"):
                fit(linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))), hvd.callbacks.Distributed())
        hvd.remove_process_set(some)

    ranks(check)


# What is told

HOW = ["tape", "tape in a function", "optimizer", "optimizer in a function"]


@pytest.mark.costly
@pytest.mark.parametrize("how", HOW)
def test_what_is_told(ranks: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that start apart; that read the same data; and that do neither. The first rank says it."""
    told: list[tuple[int, str]] = []
    monkeypatch.setattr(advice, "_warn", lambda text: told.append((hvd.rank(), text)))

    def check() -> None:
        here = world()
        here.config, config = dataclasses.replace(here.config, advice=True), here.config
        for number, (apart, same) in enumerate(((True, False), (False, True), (False, False))):
            # Each model of this file has a layout of its own: tapes are told once for each.
            layers = [keras.layers.Dense(1) for _ in range(1 + number)]
            model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1 + HOW.index(how)), *layers])
            for place, weight in enumerate(model.weights):
                weight.assign(np.full(weight.shape, place + 1.0 + (apart and hvd.rank() == 1)))
            train(model, *((X[:4], Y[:4]) if same else share(4)))
        here.config = config

    def train(model: Any, x: Any, y: Any) -> None:
        plain = keras.optimizers.SGD(0.001)
        optimizer = plain if "tape" in how else hvd.DistributedOptimizer(plain)

        def step() -> None:
            with tf.GradientTape() as recorded:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            found = hvd.DistributedGradientTape(recorded) if "tape" in how else recorded
            gradients = found.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        run = tf.function(step) if "function" in how else step
        for _ in range(3):
            run()

    sizes = ranks(lambda: check() or hvd.size())
    if len(sizes) > 1 and (not UNDER_MPI or hvd.rank() == 0):
        assert [rank for rank, _ in told] == [0, 0]
        assert "start with different weights:" in told[0][1] and "hvd.broadcast_variables" in told[0][1]
        assert "bit for bit" in told[1][1] and "hvd.shard(dataset)" in told[1][1]
    else:
        assert told == []


@pytest.mark.skipif(UNDER_MPI, reason="about a setting, which is off there; done once, on threads")
@pytest.mark.filterwarnings("ignore:hvdlite")
def test_a_rank_that_counts_otherwise_looks_with_the_others() -> None:
    """A rank that has made its optimizer anew, alone, looks in its second step: all others do so with it."""

    def check() -> None:
        model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), run_eagerly=True)
        fit(model)
        if hvd.rank() == 1:
            model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), run_eagerly=True)
        fit(model)

    on_ranks(3, check, config=Config(deadlock_time_seconds=0.3), timeout=60)


# Learning rates


@pytest.mark.ranks(3)
@pytest.mark.parametrize("package", ["keras", "tf_keras", "legacy", "eager"])
@pytest.mark.parametrize(
    ("callback", "uneven"),
    [
        (hvd.callbacks.Distributed, False),
        (hvd.callbacks.Distributed, True),
        (hvd.callbacks.BroadcastGlobalVariablesCallback, False),
    ],
)
def test_learning_rates_that_differ(ranks: Any, callback: Any, package: str, uneven: bool) -> None:
    """Rates that each rank sets as an epoch begins: an error in the first step with them, before it changes anything."""

    def check() -> None:
        library: Any = importlib.import_module("keras" if package == "eager" else package.replace("legacy", "tf_keras"))
        kind = library.optimizers.legacy.SGD if package == "legacy" else library.optimizers.SGD
        model = linear(hvd.DistributedOptimizer(kind(0.1)), library, run_eagerly=package == "eager")
        weights = []

        class Look(library.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                weights.append(model.get_weights())

        own = library.callbacks.LearningRateScheduler(lambda epoch: 0.01 * (1 + hvd.rank() * epoch))
        with pytest.raises(
            (MismatchError, tf.errors.UnknownError),
            match=r"in this step the learning rates of the ranks differ: 0.01 on rank 0, 0.02 on rank 1, 0.03 on rank 2",
        ):
            fit(model, callback(0), own, Look(), epochs=3, rows=12 if uneven and hvd.rank() == 2 else 16)
        assert len(weights) == 2 and np.array_equal(weights[1][0], model.get_weights()[0])
        assert same_everywhere(model)

    ranks(check)


@pytest.mark.ranks(2)
def test_rates_by_batches_may_end_an_epoch_apart(ranks: Any) -> None:
    """Where one rank has fewer batches. All have the rate of the last one then."""

    def check() -> None:
        model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)))
        warmup = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2)
        fit(model, hvd.callbacks.Distributed(), warmup, epochs=2, rows=16 - 8 * hvd.rank())
        assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
        assert same_everywhere(model)

    ranks(check)


@pytest.mark.ranks(2)
def test_epochs_that_differ(ranks: Any) -> None:
    def check() -> None:
        for options in ({"initial_epoch": 2 * hvd.rank()}, {"epochs": 3 + hvd.rank()}):
            model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), run_eagerly=True)
            with pytest.raises(MismatchError, match="the ranks are in different epochs"):
                fit(model, hvd.callbacks.Distributed(), **{"epochs": 3, **options})

    ranks(check)


# A model goes on


def test_a_fit_without_steps_and_callbacks_that_are_used_again(ranks: Any) -> None:
    def check() -> None:
        class Fails(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_begin(self, logs: Any = None) -> None:
                raise RuntimeError("not today")

        model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)))
        used = [hvd.callbacks.Distributed(), keras.callbacks.EarlyStopping("loss", patience=9)]
        fit(model, *used, epochs=2, initial_epoch=2)
        assert np.array_equal(model.get_weights()[0], START)
        with pytest.raises(RuntimeError, match="not today"):
            fit(model, hvd.callbacks.Distributed(), Fails())
        for _ in range(2):
            fit(model, *used, epochs=2)
        fit(model, epochs=2)
        expected = START.astype(float)
        velocity, batches = np.zeros_like(expected), np.stack([X[16 * r : 16 * r + 16] for r in range(hvd.size())])
        targets = np.stack([Y[16 * r : 16 * r + 16] for r in range(hvd.size())])
        for number in range(6 * 4):
            rows = slice(number % 4 * 4, number % 4 * 4 + 4)
            x, y = batches[:, rows].reshape(-1, 3), targets[:, rows].reshape(-1, 1)
            velocity = 0.9 * velocity - 0.01 * 2 * x.T @ (x @ expected - y) / len(x)
            expected = expected + velocity
        assert model.get_weights()[0] == pytest.approx(expected, rel=1e-4)

    ranks(check)


@pytest.mark.costly
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("eagerly", [True, False])
@pytest.mark.slow
def test_a_rank_without_data_and_metrics(ranks: Any, eagerly: bool) -> None:
    def check() -> None:
        model = linear(
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), run_eagerly=eagerly, metrics=["mae", "mse"]
        )
        rows = 16 * (hvd.rank() == 0)
        data = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(4)
        seen = model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=[hvd.callbacks.Distributed()]).history
        assert same_everywhere(model)
        assert hvd.allgather_object(seen) == [seen] * 2 and seen["mse"] == pytest.approx(seen["loss"])
        alone = linear(keras.optimizers.SGD(0.01))
        alone.fit(X[:16], Y[:16], batch_size=4, epochs=2, shuffle=False, verbose=0)
        assert model.get_weights()[0] == pytest.approx(alone.get_weights()[0], rel=1e-5)

    ranks(check)


@pytest.mark.ranks(at_least=2)
@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_an_optimizer_that_only_one_rank_makes(ranks: Any) -> None:
    """To evaluate a model that it has loaded, say. Others are still known by where they are, after a rank had no data too."""

    def check() -> None:
        if hvd.rank() == 0:
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
        for number in range(2):
            model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)))
            rows = 16 * (hvd.rank() != 1 or number > 0)
            data = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(4)
            model.fit(data, verbose=0, shuffle=False, callbacks=[hvd.callbacks.Distributed()])
            assert same_everywhere(model)

    ranks(check)


@pytest.mark.ranks(2)
def test_tf_keras_legacy_optimizers_with_a_schedule(ranks: Any) -> None:
    import tf_keras

    def check() -> None:
        kind = tf_keras.optimizers.legacy.SGD
        decay = tf_keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        model = linear(hvd.DistributedOptimizer(kind(decay)), tf_keras)
        fit(model, hvd.callbacks.Distributed(), epochs=2)
        alone = linear(kind(decay), tf_keras)
        order = np.arange(32).reshape(2, 4, 4).swapaxes(0, 1).reshape(-1)
        alone.fit(X[order], Y[order], batch_size=8, epochs=2, shuffle=False, verbose=0)
        assert model.get_weights()[0] == pytest.approx(alone.get_weights()[0], rel=1e-5)
        with pytest.raises(ArgumentError, match="is not a distributed one"):
            fit(linear(kind(0.1), tf_keras), hvd.callbacks.Distributed())

    ranks(check)


def test_rates_of_several_optimizers_in_one(ranks: Any) -> None:
    def check() -> None:
        def several() -> Any:
            inside = {".*dense.*": keras.optimizers.Adam(0.01)}
            return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.05), inside))

        model = linear(hvd.DistributedOptimizer(several()))
        fit(model, hvd.callbacks.Distributed(), epochs=2)
        assert same_everywhere(model)
        with pytest.raises(ArgumentError, match="has 2 optimizers inside, each with a learning rate of its own"):
            fit(model, hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5))
        with pytest.raises(ArgumentError, match="a MultiOptimizer does not add up gradients itself"):
            hvd.DistributedOptimizer(several(), backward_passes_per_step=2)

    ranks(check)
