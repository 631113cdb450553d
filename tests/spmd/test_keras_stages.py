"""What a Keras pipeline saves is the whole model's: other cuts load it, and one process, and they train on alike."""

from __future__ import annotations

import atexit
import itertools
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import hvdlite_tf as hvd
from hvdlite.errors import ArgumentError
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: ranks that are threads share TensorFlow's pool.
    tf.config.threading.set_inter_op_parallelism_threads(8)

ROWS, BATCH, WIDTH = 12, 4, 4  # three steps, so that a sum of two is left over
_rng = np.random.default_rng(3)
X, Y = (_rng.standard_normal((ROWS, WIDTH)).astype("float32") for _ in range(2))


def chain() -> list[Any]:
    """The layers of the model. Numbers of weights and of trained ones differ."""
    return [
        layers.Dense(
            WIDTH, activation="tanh", kernel_initializer=keras.initializers.GlorotUniform(seed), trainable=seed != 1
        )
        for seed in range(5)
    ]


def cuts(stages: int, first: int) -> list[Callable[[], keras.Model]]:
    """Stages, of which the first has so many layers."""
    bounds = [0, *(round(first + (5 - first) * number / (stages - 1)) for number in range(stages - 1)), 5]
    return [
        lambda a=a, b=b: keras.Sequential([keras.Input((WIDTH,)), *chain()[a:b]]) for a, b in itertools.pairwise(bounds)
    ]


def whole(optimizer: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((WIDTH,)), *chain()])
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def staged(optimizer: Any, first: int, process_set: Any = hvd.global_process_set) -> hvd.Pipeline:
    model = hvd.Pipeline(cuts(hvd.size() if process_set is hvd.global_process_set else 2, first), 2, process_set)
    model.compile(optimizer, "mse")
    return model


def train(model: Any, epochs: int = 1, rows: Any = slice(None), batch: int = BATCH) -> None:
    model.fit(X[rows], Y[rows], batch_size=batch, epochs=epochs, shuffle=False, verbose=0)


def weights(model: Any) -> list[Any]:
    return (
        [each for stage in model.full_weights() for each in stage]
        if hasattr(model, "full_weights")
        else model.get_weights()
    )


def assert_equal(one: Any, other: Any) -> None:
    for ours, theirs in zip(weights(one), weights(other), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


def make(**settings: Any) -> Any:
    settings = {"use_ema": True, "ema_overwrite_frequency": 2, "gradient_accumulation_steps": 2} | settings
    return keras.optimizers.Adam(0.02, amsgrad=True, **settings)


def new_folder() -> str:
    """Return the path of a new folder, the same on all ranks. It goes with the process."""
    folder = tempfile.mkdtemp(prefix="keras-stages-") if hvd.rank() == 0 else ""
    if folder:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return hvd.broadcast_object(folder)


@pytest.mark.slow
@pytest.mark.ranks(at_least=2)
def test_other_cuts_and_one_process_train_on(ranks: Any) -> None:
    def check() -> None:
        alone, pipeline = whole(make()), staged(make(), 1)
        for model in (alone, pipeline):
            train(model)
        paths = new_folder(), new_folder()
        for path, model in zip(paths, (pipeline, alone), strict=True):
            hvd.checkpoint.save(path, model=model, optimizer=model.optimizer)
        train(alone)
        others = whole(make()), staged(make(), 3)
        apart = others[1]
        apart.optimizer.build(apart.trainable_variables)
        for path in paths:
            for again in others:
                hvd.checkpoint.load(path, model=again)
                train(again)
                assert_equal(again, alone)
            hvd.checkpoint.load(path, model=apart.stage, optimizer=apart.optimizer)  # which is not the stage's
            train(apart)
            assert_equal(apart, alone)
        with pytest.raises(ArgumentError, match="the Adam was another one .*_velocities"):
            hvd.checkpoint.load(paths[0], model=staged(keras.optimizers.SGD(momentum=0.1), 1))
        with pytest.raises(ArgumentError, match="the model was another one"):
            hvd.checkpoint.load(paths[0], model=keras.Sequential([keras.Input((WIDTH,)), *chain()[:2]]))

    ranks(check)


@pytest.mark.costly
@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=str)
@pytest.mark.slow
def test_a_grid(ranks: Any, options: dict[str, Any]) -> None:
    """Two pipelines side by side: what each has added up for itself is put together by its places."""

    def check() -> None:
        grid = hvd.ProcessGrid(dp=2, pp=2)
        half = np.arange(24).reshape(3, 2, 4)[:, grid.place["dp"]].reshape(-1) % ROWS
        both = np.arange(24) % ROWS

        def distributed(first: int) -> hvd.Pipeline:
            return staged(hvd.DistributedOptimizer(plain(), process_set=grid["dp"], **options), first, grid["pp"])

        def plain() -> Any:
            clipping = make(global_clipnorm=0.05)
            return keras.optimizers.LossScaleOptimizer(clipping, initial_scale=8.0) if options else clipping

        alone, pipeline = whole(plain()), distributed(1)
        train(alone, rows=both, batch=8)
        train(pipeline, rows=half, batch=4)
        path = new_folder()
        hvd.checkpoint.save(path, model=pipeline)
        train(alone, rows=both, batch=8)
        for first in (1, 3):
            again = distributed(first)
            hvd.checkpoint.load(path, model=again)
            train(again, rows=half, batch=4)
            assert_equal(again, alone)
        again = whole(plain())
        hvd.checkpoint.load(path, model=again)
        train(again, rows=both, batch=8)
        assert_equal(again, alone)

    ranks(check)


def scaled(scale: float) -> Any:
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=0.05), initial_scale=scale, dynamic_growth_steps=4
    )


def huge(process_set: Any = hvd.global_process_set, count: int = 0) -> tuple[keras.Model, Any]:
    """A model, whole and in stages, of which the gradients of the first stage are too large to be scaled that much."""
    last = range(1, count or hvd.size())

    def part(number: int) -> list[Any]:
        start = keras.initializers.RandomUniform(-1e-5, 1e-5, seed=8)
        first = [layers.Dense(WIDTH, kernel_initializer=start)]
        return first if number == 0 else [chain()[number + 1]]

    parts = [lambda n=n: keras.Sequential([keras.Input((WIDTH,)), *part(n)]) for n in [0, *last]]
    model = keras.Sequential([keras.Input((WIDTH,)), *(layer for n in [0, *last] for layer in part(n))])
    return model, hvd.Pipeline(parts, 2, process_set)


@pytest.mark.ranks(at_least=2)
def test_scaled_losses(ranks: Any) -> None:
    """An overflow in one stage lets all stages skip the step, and the scales stay those of one process."""

    def check() -> None:
        found: list[Any] = []
        for model in huge():
            model.compile(scaled(2.0**118), "mse", run_eagerly=True)
            steps = [model.train_on_batch(X[:4] * 1e4, Y[:4]) for _ in range(7)]
            optimizer = model.optimizer
            counts = [float(each.numpy()) for each in (optimizer.dynamic_scale, optimizer.iterations)]
            found.append((weights(model), counts, steps))
        (one, counts, steps), (ours, our_counts, our_steps) = found
        assert counts[1] < 7  # some steps were skipped
        assert hvd.allgather_object(our_counts) == [counts] * hvd.size()
        np.testing.assert_allclose(our_steps, steps, rtol=1e-4)
        for value, other in zip(ours, one, strict=True):
            np.testing.assert_allclose(value, other, rtol=0, atol=1e-6)
        models = (
            whole(keras.optimizers.SGD(0.1, loss_scale_factor=64.0)),
            staged(keras.optimizers.SGD(0.1, loss_scale_factor=64.0), 1),
        )
        for model in models:
            train(model)
        assert_equal(*models)

    ranks(check)


class ByAllGradients(keras.optimizers.SGD):  # type: ignore[misc]
    """Steps by a norm over all gradients, as Prodigy and D-Adaptation do."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        norm = keras.ops.sqrt(sum(keras.ops.sum(each**2) for each in grads))
        super().apply([each / norm for each in grads], trainable_variables)


@pytest.mark.ranks(2)
def test_optimizers_that_look_across_variables(ranks: Any) -> None:
    def check() -> None:
        with pytest.raises(ArgumentError, match="ByAllGradients does not step each variable by itself"):
            train(staged(ByAllGradients(0.1), 1))
        sgd = keras.optimizers.SGD(0.1)
        with pytest.raises(ArgumentError, match="a MultiOptimizer chooses optimizers by the variables"):
            train(staged(keras.optimizers.MultiOptimizer(lambda variable: sgd), 1))
        models = whole(keras.optimizers.Muon(0.1)), staged(keras.optimizers.Muon(0.1), 1)
        for model in models:
            train(model)
        assert_equal(*models)

    ranks(check)


@pytest.mark.ranks(at_least=2)
@pytest.mark.slow
def test_an_elastic_state_has_all_stages(ranks: Any) -> None:
    def check() -> None:
        alone, pipeline = whole(make()), staged(make(), 1)
        state = hvd.elastic.KerasState(pipeline, epoch=0)
        state.sync()
        for model in (alone, pipeline):
            train(model)
        state.epoch = 1
        state.save()
        train(pipeline)
        state.restore()
        again = staged(make(), 3)  # as a job that starts again makes it, with what rank 0 has saved
        restarted = hvd.elastic.KerasState(again, epoch=0)
        if hvd.rank() == 0:
            restarted.set_saved(state.saved())
            restarted.restore()
        restarted.sync()
        assert restarted.epoch == 1
        train(alone)
        for model in (pipeline, again):
            train(model)
            assert_equal(model, alone)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_stages_are_not_overwritten(ranks: Any) -> None:
    def check() -> None:
        pipeline = staged(keras.optimizers.SGD(0.1), 1)
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        with pytest.raises(ArgumentError, match="is a parameter of a stage of a Pipeline .* have different stages"):
            pipeline.fit(X, Y, verbose=0, callbacks=[start])
        for given in (pipeline.weights, [each.value for each in pipeline.stage.weights]):
            with pytest.raises(ArgumentError, match="have different stages"):
                hvd.broadcast_variables(given)
        with pytest.raises(ArgumentError, match="parts of model are on ranks .* do not save"):
            hvd.checkpoint.save("nowhere", model=pipeline, process_set=own_set())

    ranks(check)


def own_set() -> Any:
    sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    return sets[hvd.rank()]
