"""Keras' callbacks on several ranks, against NumPy, closed forms, and training in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.errors import ArgumentError, MismatchError, NotInitializedError
from hvdlite.testing import on_ranks
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: ranks that are threads share TensorFlow's pool.
    tf.config.threading.set_inter_op_parallelism_threads(8)

_rng = np.random.default_rng(11)
X = _rng.standard_normal((64, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]] + 0.1 * _rng.standard_normal((64, 1))).astype("float32")
START = np.array([[0.3], [0.1], [-0.2]], "float32")


def linear(optimizer: Any, package: Any = keras, **options: Any) -> Any:
    """y = x · w, whose training can be written down."""
    model = package.Sequential([package.layers.InputLayer((3,)), package.layers.Dense(1, use_bias=False)])
    model.set_weights([START])
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def begin(callback: Any, optimizer: Any, steps: int | None = None) -> Any:
    """What `fit` does with a callback before the first epoch; without training."""
    model = linear(optimizer)
    optimizer.build(model.trainable_variables)
    callback.set_model(model)
    callback.set_params({"steps": steps})
    callback.on_train_begin()
    return model


class Recorder(keras.callbacks.Callback):  # type: ignore[misc]  # mypy does not see Keras
    """What a callback in this place of the list is told."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[dict[str, float]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(dict(logs))


# The start


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("kind", ["sizes", "numbers"])
def test_different_models_are_a_mismatch(ranks: Any, kind: str) -> None:
    """As where a model is built from data that has another shape on one rank."""

    def check() -> None:
        last = hvd.rank() == hvd.size() - 1
        features, layers = (4, 1) if last and kind == "sizes" else (3, 2) if last else (3, 1)
        model = keras.Sequential([keras.layers.Input((features,)), *(keras.layers.Dense(3) for _ in range(layers))])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        text = rf"shape \(3, 3\) and .* of rank {hvd.size() - 1} of shape \(4, 3\)" if kind == "sizes" else "has 4"
        for callback in (hvd.BroadcastGlobalVariablesCallback(0), hvd.callbacks.Distributed()):
            callback.set_model(model)
            with pytest.raises(MismatchError, match=f"the ranks have different models.*{text}"):
                callback.on_train_begin()

    ranks(check)


def test_local_variables_stay(ranks: Any) -> None:
    def check() -> None:
        optimizer = keras.optimizers.SGD(0.1)
        model = keras.Sequential([keras.layers.Input((3,)), *(keras.layers.Dense(1, use_bias=False) for _ in range(3))])
        model.compile(optimizer, "mse")
        for weight in model.weights:
            weight.assign(tf.fill(weight.shape, float(hvd.rank())))
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(hvd.size() - 1, "", [model.weights[0]])
        callback.register_local_var(model.weights[2])
        callback.set_model(model)
        callback.on_train_begin()
        means = [float(tf.reduce_mean(weight.value)) for weight in model.weights]
        assert means == [hvd.rank(), hvd.size() - 1, hvd.rank()]

    ranks(check)


# Metrics


@pytest.mark.ranks(at_least=2)
def test_metrics_are_those_of_all_samples(ranks: Any) -> None:
    """The ranks have different numbers of samples, in batches of different sizes; the last has no validation data."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        train = [slice(0, 10), slice(10, 17), slice(17, 40), slice(40, 64)][:size]
        test = [slice(0, 3), slice(3, 20), slice(20, 30), slice(30, 35)][: size - 1]
        w = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, use_bias=False)])
        w.set_weights([START])
        w.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"], run_eagerly=True)
        before, after = Recorder(), Recorder()
        history = w.fit(
            *(X[train[rank]], Y[train[rank]]),
            batch_size=4,
            epochs=2,
            validation_data=(X[test[rank]], Y[test[rank]]) if rank < size - 1 else None,
            callbacks=[before, hvd.callbacks.MetricAverageCallback(), after],
            verbose=0,
        )
        error = np.abs(X @ START - Y)[:, 0]
        for prefix, parts in (("", train), ("val_", test)):
            rows = np.concatenate([error[part] for part in parts])
            for logs in after.epochs:
                assert logs[f"{prefix}loss"] == pytest.approx(np.mean(rows**2), rel=1e-5)
                assert logs[f"{prefix}mae"] == pytest.approx(np.mean(rows), rel=1e-5)
        assert history.history["val_mae"] == [logs["val_mae"] for logs in after.epochs]
        assert before.epochs[0]["mae"] == pytest.approx(np.mean(error[train[rank]]), rel=1e-5)
        assert hvd.allgather_object(after.epochs) == [after.epochs] * size

    ranks(check)


def test_averages_of_uneven_logs(ranks: Any) -> None:
    """Values that some ranks lack, values of no samples, arrays, texts."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        seen = tf.Variable(float(rank))  # rank 0 has seen no sample
        callback = hvd.callbacks.MetricAverageCallback("")
        callback.set_model(SimpleNamespace(metrics=[SimpleNamespace(name="loss", count=seen)]))
        callback.on_epoch_begin(0)
        logs = {"loss": np.nan if rank == 0 else rank, "rows": np.array([rank, 1.0]), "text": f"rank {rank}"}
        if rank == size - 1:
            logs["mine"] = 5.0
        callback.on_epoch_end(0, logs)
        counts = np.arange(size)
        assert logs["text"] == f"rank {rank}"
        assert logs["mine"] == 5
        if size > 1:
            mean = np.average(counts, weights=counts)
            assert logs["loss"] == pytest.approx(mean)
            assert logs["rows"] == pytest.approx([mean, 1.0])
        else:
            assert np.isnan(logs["loss"])
        # No count anywhere, as with a train_step that keeps no loss of Keras' own: all count alike.
        callback.set_model(SimpleNamespace(metrics=[]))
        callback.on_epoch_begin(1)
        logs = {"loss": float(rank)}
        callback.on_epoch_end(1, logs)
        assert logs == {"loss": (size - 1) / 2}

    ranks(check)


# Learning rates


def rates(callback: Any, epochs: int, steps: int, optimizer: Any = None) -> np.ndarray:
    """The learning rate at each batch, (epochs, steps)."""
    model = begin(callback, keras.optimizers.SGD(7.0) if optimizer is None else optimizer, steps)
    found = np.zeros((epochs, steps))
    for epoch in range(epochs):
        callback.on_epoch_begin(epoch)
        for batch in range(steps):
            callback.on_train_batch_begin(batch)
            found[epoch, batch] = float(model.optimizer.learning_rate)
            callback.on_train_batch_end(batch)
        logs: dict[str, Any] = {}
        callback.on_epoch_end(epoch, logs)
        assert logs["lr"] == pytest.approx(found[epoch, -1])
    return found


@pytest.mark.parametrize("explicit", [True, False])
def test_warmup(ranks: Any, explicit: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Goyal et al., section 2.2: in equal steps from near η to kη; batches are counted, and the longest rank's count."""

    def check() -> None:
        size = hvd.size()
        arguments = {"steps_per_epoch": 4} if explicit else {}
        callback = hvd.callbacks.LearningRateWarmupCallback(0.5 * size, 3, verbose=1, **arguments)
        model = begin(callback, keras.optimizers.SGD(7.0), 4 - hvd.rank())  # a rank may have fewer batches
        found = []
        for epoch in range(5):
            callback.on_epoch_begin(epoch)
            for batch in range(4):
                callback.on_train_batch_begin(batch)
                found.append(float(model.optimizer.learning_rate))
            callback.on_epoch_end(epoch, {})
        step = np.arange(1, 13)
        expected = [*(0.5 + (0.5 * size - 0.5) * step / 12), *([0.5 * size] * 8)]
        assert found == pytest.approx(expected)
        hvd.barrier()

    ranks(check)
    printed = capsys.readouterr().out
    assert printed.count("Epoch 3: the warm-up has reached a learning rate of") == (not UNDER_MPI or hvd.rank() == 0)


@pytest.mark.ranks(3)
def test_warmup_of_some_ranks(ranks: Any) -> None:
    """Ranks that are not in the set are neither asked nor counted."""

    def check() -> None:
        some = hvd.add_process_set([1, 2])
        if hvd.rank() > 0:
            callback = hvd.callbacks.LearningRateWarmupCallback(0.8, 1, process_set=some)
            model = begin(callback, keras.optimizers.SGD(7.0), 4)
            callback.on_epoch_begin(0)
            callback.on_batch_begin(0)
            assert float(model.optimizer.learning_rate) == pytest.approx(0.8 / 2 * (1 + 1 / 4))
        hvd.remove_process_set(some)

    ranks(check)


def test_schedules(ranks: Any) -> None:
    def check() -> None:
        def schedule(*arguments: Any, **more: Any) -> Any:
            return hvd.callbacks.LearningRateScheduleCallback(0.5, *arguments, **more)

        assert rates(schedule(0.1, 1, 3), 4, 2).ravel() == pytest.approx([7, 7, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05])
        assert rates(schedule(lambda epoch: 0.5**epoch), 3, 2)[:, 1] == pytest.approx([0.5, 0.25, 0.125])
        smooth = rates(schedule(lambda epoch: 1 + epoch, staircase=False, end_epoch=2), 3, 4)
        assert smooth.ravel() == pytest.approx(0.5 * np.minimum(1 + np.arange(12) / 4, 2.75))
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(7.0))
        assert rates(schedule(0.1), 1, 1, scaled)[0, 0] == pytest.approx(0.05)

    ranks(check)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction(nesterov: bool) -> None:
    """Equal to momentum whose sum is of gradients, and not of steps: u ← m·u + g, w ← w − η·u (Goyal et al., section 3)."""

    def check() -> None:
        gradients = _rng.standard_normal((6, 3, 1)).astype("float32")
        etas = np.array([0.1, 0.1, 0.4, 0.4, 0.02, 0.3])
        for corrected in (True, False):
            callback = hvd.callbacks.LearningRateScheduleCallback(
                1.0, lambda epoch: etas[round(epoch * 6)], 0, 1, False, corrected, 6
            )
            model = begin(callback, keras.optimizers.SGD(0.1, momentum=0.9, nesterov=nesterov))
            step = tf.function(lambda gradient, model=model: model.optimizer.apply([gradient]))
            w, u, v = (START.astype(float), np.zeros((3, 1)), np.zeros((3, 1)))
            callback.on_epoch_begin(0)
            for batch, (gradient, eta) in enumerate(zip(gradients, etas, strict=True)):
                callback.on_train_batch_begin(batch)
                step(tf.constant(gradient))
                callback.on_train_batch_end(batch)
                u, v = 0.9 * u + gradient, 0.9 * v - eta * gradient
                if corrected:
                    w = w - eta * (gradient + 0.9 * u if nesterov else u)
                else:
                    w = w + (0.9 * v - eta * gradient if nesterov else v)
                assert model.get_weights()[0] == pytest.approx(w, rel=1e-4, abs=1e-6)

    on_ranks(1, check)


def test_momentum_without_steps_in_it_is_left_alone() -> None:
    def check() -> None:
        for optimizer, scaled in (
            (keras.optimizers.Adam(0.5), []),
            (keras.optimizers.SGD(0.5), []),
            (keras.optimizers.RMSprop(0.5, momentum=0.9), ["momentum"]),
            (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5, momentum=0.9)), ["momentum"]),
        ):
            callback = hvd.callbacks.LearningRateScheduleCallback(1.0, 0.25)
            begin(callback, optimizer)
            state = [v for v in optimizer.variables if v.shape == START.shape]
            for variable in state:
                variable.assign(tf.ones(variable.shape))
            callback.on_train_batch_begin(0)
            for variable in state:
                wanted = 0.5 if any(word in variable.path for word in scaled) else 1.0
                assert (variable.numpy() == wanted).all(), variable.path

    on_ranks(1, check)


# All at once


SHARES = [[slice(0, 8), slice(8, 16), slice(16, 24)], [slice(24, 32)], [], [slice(32, 40), slice(40, 48)]]
"""Which rows make the batches of each rank: three, one, none, two."""


def one_process(size: int, epochs: int) -> np.ndarray:
    """SGD with momentum on the joined batches, in NumPy. Those of a rank are the means of its own rows."""
    w, v = START.astype(float), np.zeros((3, 1))
    for _ in range(epochs):
        for step in range(3):
            present = [share[step] for share in SHARES[:size] if step < len(share)]
            parts = [2 * X[rows].T @ (X[rows] @ w - Y[rows]) / len(X[rows]) for rows in present]
            v = 0.9 * v - 0.05 * np.mean(parts, axis=0)
            w = w + v
    return w


def batches(rank: int) -> Any:
    """This rank's, as a dataset that may be empty."""
    rows = np.concatenate([np.arange(64)[share] for share in SHARES[rank]] or [np.arange(0)])
    return tf.data.Dataset.from_tensor_slices((X[rows], Y[rows])).batch(8)


@pytest.mark.ranks(at_least=2)
@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("validate", [True, False])
def test_ranks_with_different_numbers_of_batches(ranks: Any, validate: bool) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), metrics=["mae"])
        if rank > 0:
            model.set_weights([START + rank])  # the start is rank 0's
        history = model.fit(
            batches(rank),
            epochs=3,
            shuffle=False,
            callbacks=[hvd.callbacks.Distributed()],
            validation_data=(X[48 + rank :], Y[48 + rank :]) if validate else None,
            verbose=0,
        ).history
        weights = model.get_weights()[0]
        assert weights == pytest.approx(one_process(size, 3), rel=1e-5, abs=1e-6)
        assert all(np.array_equal(weights, other) for other in hvd.allgather_object(weights))
        momentum = model.optimizer.momentums[0].numpy()
        assert all(np.array_equal(momentum, other) for other in hvd.allgather_object(momentum))
        assert hvd.allgather_object(history) == [history] * size
        if validate:
            rows = np.concatenate([np.arange(48 + r, 64) for r in range(size)])
            assert history["val_mae"][-1] == pytest.approx(np.mean(np.abs(X[rows] @ weights - Y[rows])), rel=1e-4)

    ranks(check)


@pytest.mark.filterwarnings("ignore:.*HDF5 file")
@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_moving_statistics_of_uneven_data(ranks: Any, tmp_path: Path, library: str) -> None:
    """After each epoch every rank validates, and rank 0 saves, the model of the rank that was the last: its statistics too."""
    package: Any = pytest.importorskip(library)

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        if size == 3 and library == "tf_keras":
            return
        normalization = package.layers.BatchNormalization(momentum=0.5, center=False, scale=False)
        model = package.Sequential([package.layers.InputLayer((3,)), normalization, package.layers.Dense(1)])
        optimizer = hvd.DistributedOptimizer(package.optimizers.SGD(0.01))
        model.compile(optimizer, "mse")
        own = X[: 16 * (rank + 1)] + 5 * rank
        data = tf.data.Dataset.from_tensor_slices((own, Y[: len(own)])).batch(8)
        path = hvd.broadcast_object(str(tmp_path / "model.keras"), 0)  # each process has a folder of its own
        kept = package.layers.Dense(1)
        kept.build((None, 1))
        model.kept, kept.trainable = kept, False
        kept.set_weights([np.full((1, 1), float(rank)), np.full(1, float(rank))])
        callback = hvd.callbacks.Distributed(checkpoint=path, local_variables=kept.weights)
        model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[callback])
        mean = np.zeros(3)
        for _ in range(2):
            for begin in range(0, 16 * size, 8):  # those of the last rank
                mean = (mean + X[begin : begin + 8].mean(0) + 5 * (size - 1)) / 2
        assert normalization.moving_mean.numpy() == pytest.approx(mean, rel=1e-4)
        everybody = hvd.allgather_object([weight.numpy() for weight in model.weights if weight.shape != (1, 1)][:4])
        assert all(np.array_equal(a, b) for other in everybody for a, b in zip(other, everybody[0], strict=True))
        assert kept.kernel.numpy() == rank
        hvd.barrier()
        saved = package.models.load_model(path)
        assert np.array_equal(saved.layers[0].moving_mean.numpy(), normalization.moving_mean.numpy())

    ranks(check)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:.*HDF5 file")
def test_tf_keras(ranks: Any, tmp_path: Path) -> None:
    """The same callbacks in a model of Keras 2: uneven data, joint metrics, schedule with momentum correction, one file."""
    import tf_keras

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(7.0, momentum=0.9))
        model = linear(optimizer, tf_keras, metrics=["mae"])
        if rank > 0:
            model.set_weights([START + rank])
        path = tmp_path / f"{rank}.weights.h5"
        history = model.fit(
            batches(rank),
            epochs=3,
            validation_data=(X[48 + rank :], Y[48 + rank :]),
            callbacks=[
                hvd.callbacks.Distributed(checkpoint=tmp_path / f"{rank}.keras"),
                # Sets the rate before the first step, when there is no momentum to correct.
                hvd.callbacks.LearningRateScheduleCallback(0.05, 1.0),
                hvd.callbacks.BestModelCheckpoint("loss", 0, True, "min", filepath=path),
                tf_keras.callbacks.EarlyStopping("val_mae", patience=9),
            ],
            verbose=0,
        ).history
        weights = model.get_weights()[0]
        assert weights == pytest.approx(one_process(size, 3), rel=1e-5, abs=1e-6)
        assert all(np.array_equal(weights, other) for other in hvd.allgather_object(weights))
        assert hvd.allgather_object(history) == [history] * size
        assert history["lr"] == pytest.approx([0.05] * 3)
        rows = np.concatenate([np.arange(48 + r, 64) for r in range(size)])
        assert history["val_mae"][-1] == pytest.approx(np.mean(np.abs(X[rows] @ weights - Y[rows])), rel=1e-4)
        assert path.exists() == (tmp_path / f"{rank}.keras").exists() == (rank == 0)

    ranks(check)


def test_momentum_correction_of_tf_keras() -> None:
    import tf_keras

    def check() -> None:
        legacy = tf_keras.optimizers.legacy
        for optimizer, scaled in (
            (tf_keras.optimizers.SGD(0.5, momentum=0.9), True),
            (legacy.SGD(0.5, momentum=0.9), True),
            (legacy.RMSprop(0.5, momentum=0.9), True),
            (tf_keras.optimizers.Adam(0.5), False),
            (legacy.SGD(0.5), False),
        ):
            callback = hvd.callbacks.LearningRateScheduleCallback(1.0, 0.25)
            model = linear(optimizer, tf_keras)
            optimizer.apply_gradients([(tf.ones_like(START), model.trainable_variables[0])])
            found = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
            momenta = [variable for variable in found if "momentum" in variable.name or "/m/" in variable.name]
            before = [variable.numpy() for variable in momenta]
            callback.set_model(model)
            callback.on_train_begin()
            callback.on_train_batch_begin(0)
            assert float(optimizer.learning_rate) == 0.25
            for variable, was in zip(momenta, before, strict=True):
                assert variable.numpy() == pytest.approx(was * (0.5 if scaled else 1.0)) and was.any()
            assert len(momenta) == (0 if optimizer.__class__ is legacy.SGD and not scaled else 1)

    on_ranks(1, check)


def test_one_rank_stops_all(ranks: Any) -> None:
    """And: Keras' own early stopping sees the metrics of all, one progress bar, one file."""

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1 and hvd.rank() == hvd.size() - 1:
                self.model.stop_training = True

    def check() -> None:
        model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)))
        rows = slice(hvd.rank() * 8, hvd.rank() * 8 + 8)
        options = {"epochs": 4, "verbose": 0, "batch_size": 8}
        history = model.fit(X[rows], Y[rows], callbacks=[hvd.callbacks.Distributed(), Stop()], **options)
        assert history.epoch == [0, 1]
        # The rate is so large that the joined loss grows at once, though it may shrink for some rank.
        model.optimizer.learning_rate = 50.0
        patient = keras.callbacks.EarlyStopping("loss", patience=1)
        history = model.fit(X[rows], Y[rows], callbacks=[hvd.callbacks.Distributed(), patient], **options)
        assert history.epoch == [0, 1]

    ranks(check)


def test_one_progress_bar_and_one_file(ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check() -> None:
        rank = hvd.rank()
        model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), run_eagerly=True)
        model.fit(
            *(X[:8], Y[:8]),
            batch_size=8,
            epochs=2,
            verbose=2,
            callbacks=[hvd.callbacks.Distributed(checkpoint=tmp_path / f"{rank} {{epoch}}.keras")],
        )
        files = sorted(path.name for path in tmp_path.glob(f"{rank} *"))
        assert files == (["0 1.keras", "0 2.keras"] if rank == 0 else [])
        if rank == 0:
            saved = keras.models.load_model(tmp_path / "0 2.keras")
            assert type(saved.optimizer) is keras.optimizers.SGD
            assert np.array_equal(saved.get_weights()[0], model.get_weights()[0])
        hvd.barrier()

    ranks(check)
    printed = capsys.readouterr().out
    assert printed.count("Epoch 2/2") == printed.count("1/1 - ") / 2 == (not UNDER_MPI or hvd.rank() == 0)


def test_best_model_checkpoint(ranks: Any, tmp_path: Path) -> None:
    def check() -> None:
        rank = hvd.rank()
        path = tmp_path / f"{rank}.weights.h5"
        callback = hvd.callbacks.BestModelCheckpoint("loss", 0, True, filepath=path)
        model = begin(callback, keras.optimizers.SGD(0.1))
        for epoch, loss in enumerate([3.0, 1.0, 2.0]):
            model.set_weights([START + epoch])
            callback.on_epoch_begin(epoch)
            callback.on_epoch_end(epoch, {"loss": loss})
        assert path.exists() == (rank == 0)
        if rank == 0:
            model.load_weights(path)
            assert np.array_equal(model.get_weights()[0], START + 1)

    ranks(check)


def test_best_model_checkpoint_needs_a_file(tmp_path: Path) -> None:
    def check() -> None:
        callback = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        with pytest.raises(ArgumentError, match='pass filepath="best.keras"'):
            begin(callback, keras.optimizers.SGD(0.1))
        callback.filepath = str(tmp_path / "late.keras")  # as Horovod's programs do
        begin(callback, keras.optimizers.SGD(0.1))
        callback.on_epoch_end(0, {"loss": 1.0})
        assert (tmp_path / "late.keras").exists()

    on_ranks(1, check)


# Bad input


def fit_with(*callbacks: Any) -> None:
    model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), run_eagerly=True)
    model.fit(X[:4], Y[:4], verbose=0, callbacks=list(callbacks))


def test_the_wrong_order_is_refused_on_every_rank(ranks: Any) -> None:
    """Though the lists may be wrong on one rank only."""

    def check() -> None:
        last = hvd.rank() == hvd.size() - 1
        where = "" if hvd.size() == 1 else f"On rank {hvd.size() - 1}: "
        for make, text in (
            (hvd.callbacks.Distributed, "Distributed comes after EarlyStopping .* put it first"),
            (hvd.callbacks.MetricAverageCallback, "EarlyStopping comes before MetricAverageCallback .* one rank"),
        ):
            stopper, ours = keras.callbacks.EarlyStopping("loss"), make()
            with pytest.raises(ArgumentError, match=f"^{where}.*{text}"):
                fit_with(*([stopper, ours] if last else [ours, stopper]))
        # These do not decide anything by the metrics.
        fit_with(keras.callbacks.ModelCheckpoint("unused.keras", save_freq=1000), hvd.callbacks.MetricAverageCallback())

    ranks(check)


@pytest.mark.ranks(2, 3)
def test_backups_in_one_folder_are_refused(ranks: Any, tmp_path: Path) -> None:
    def check() -> None:
        folder = Path(hvd.broadcast_object(str(tmp_path), 0))
        ours, backups = hvd.callbacks.Distributed(), keras.callbacks.BackupAndRestore(folder / "all")
        with pytest.raises(ArgumentError, match="BackupAndRestore the folder .* a folder of its own"):
            fit_with(ours, backups)
        fit_with(ours, keras.callbacks.BackupAndRestore(folder / str(hvd.rank())))

    ranks(check)


def test_learning_rates_that_differ(ranks: Any) -> None:
    class Own(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.5 + hvd.rank()

    def check() -> None:
        if hvd.size() > 1:
            with pytest.raises(MismatchError, match=r"after epoch 1 the learning rates .*: 0.5 on rank 0, 1.5 on"):
                fit_with(hvd.callbacks.Distributed(), Own())

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_data_of_different_kinds(ranks: Any) -> None:
    def check() -> None:
        last = hvd.rank() == hvd.size() - 1
        model = linear(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), run_eagerly=True)
        for x, y, text in (
            (X[:4], Y[:4].astype(int), rf"and int64 with 2 dimensions on rank {hvd.size() - 1}"),
            (X[:4], Y[:4, 0], "float32 with 2 dimensions and float32 with 2 dimensions on rank 0"),
        ):
            data = (x, y) if last else (X[:4], Y[:4])
            with pytest.raises(MismatchError, match=f"the ranks have data of different kinds.*{text}"):
                model.fit(*data, verbose=0, callbacks=[hvd.callbacks.Distributed()])
        train = model.train_function
        size = 2 if last else 3
        model.fit(X[:size], Y[:size], epochs=2, verbose=0, callbacks=[hvd.callbacks.Distributed()])
        assert model.train_function is train

    ranks(check)


def test_schedules_that_cannot_be(ranks: Any) -> None:
    def check() -> None:
        decay = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        callback: Callable[..., Any] = hvd.callbacks.LearningRateScheduleCallback
        last = hvd.rank() == hvd.size() - 1
        with pytest.raises(ArgumentError, match="of this SGD is a ExponentialDecay, which a callback cannot set"):
            begin(callback(0.1, 0.5), keras.optimizers.SGD(decay if last else 0.1))
        with pytest.raises(ArgumentError, match="pass steps_per_epoch to LearningRateWarmupCallback"):
            begin(hvd.callbacks.LearningRateWarmupCallback(0.1), keras.optimizers.SGD(0.1))
        with pytest.raises(ArgumentError, match="initial_lr=None"):
            callback(None, 0.5)
        with pytest.raises(ArgumentError, match="steps_per_epoch=0"):
            callback(0.1, 0.5, steps_per_epoch=0)

    ranks(check)


@pytest.mark.skipif(UNDER_MPI, reason="init has been called there")
def test_before_init() -> None:
    with pytest.raises(NotInitializedError):
        hvd.callbacks.Distributed()
