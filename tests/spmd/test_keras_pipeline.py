"""A Keras pipeline trains as the whole model does in one process; wrong arguments are named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from keras import layers

import hvdlite
import hvdlite_tf as hvd
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite_tf.pipeline.stage import one_forward_one_backward
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # Ranks that are threads share TensorFlow's pool: it needs a thread for each rank that waits for the others.
    tf.config.threading.set_inter_op_parallelism_threads(8)

ROWS, BATCH, WIDTH = 48, 24, 8
_rng = np.random.default_rng(3)
X, Y = (_rng.standard_normal((ROWS, width)).astype("float32") for width in (WIDTH, 3))
TOKENS = _rng.integers(0, 11, (ROWS, 5))
IMPORTANCE = _rng.uniform(0.5, 2.0, ROWS).astype("float32")


def dense(units: int, seed: int, **options: Any) -> Any:
    return layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed), **options)


def inlet() -> list[Any]:
    return [keras.Input((WIDTH,)), dense(16, 1, activation="tanh", kernel_regularizer="l2")]


def middle(seed: int) -> list[Any]:
    return [keras.Input((16,)), dense(16, seed, activation="gelu", activity_regularizer="l2")]


def outlet() -> list[Any]:
    return [keras.Input((16,)), dense(3, 9, bias_regularizer="l1")]


def parts(count: int) -> list[list[Any]]:
    """The layers of each stage; a single stage has them all."""
    if count == 1:
        return [[*inlet(), *outlet()[1:]]]
    return [inlet(), *(middle(seed) for seed in range(2, count)), outlet()]


def whole(count: int) -> keras.Model:
    return keras.Sequential([*itertools.chain(parts(count)[0], *(part[1:] for part in parts(count)[1:]))])


def optimizer() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def compiled(model: Any, **options: Any) -> Any:
    model.compile(**{"optimizer": optimizer(), "loss": "mse", "metrics": ["mae"]} | options)
    return model


def assert_equal(found: list[Any], model: keras.Model) -> None:
    ours = [weight for stage in found for weight in stage]
    for one, other in zip(ours, model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_fit_evaluate_and_predict(ranks: Any, microbatches: int) -> None:
    def check() -> None:
        size = hvd.size()
        model = compiled(whole(size))
        options = {"batch_size": BATCH, "epochs": 3, "shuffle": False, "verbose": 0, "sample_weight": IMPORTANCE}
        expected = model.fit(X, Y, validation_data=(X[:7], Y[:7]), **options).history
        stages = [lambda part=part: keras.Sequential(part) for part in parts(size)]
        pipeline = compiled(hvd.Pipeline(stages, microbatches))
        history = pipeline.fit(X, Y, validation_data=(X[:7], Y[:7]), **options).history
        assert history.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5)
        assert_equal(pipeline.full_weights(), model)
        np.testing.assert_allclose(pipeline.predict(X[:5], verbose=0), model.predict(X[:5], verbose=0), atol=1e-5)
        assert f"{size} stages, {microbatches} micro-batches, 1f1b" in pipeline.report()

    ranks(check)


class Pair(keras.Model):  # type: ignore[misc]
    """A stage with two outputs, of which one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = layers.Embedding(11, 16, embeddings_initializer=keras.initializers.RandomUniform(seed=5))
        self.build((None, 5))

    def build(self, shape: Any) -> None:
        self.embed.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return {"words": self.embed(x), "numbers": x}


class Joined(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.dense = dense(3, 6)
        self.dense.build((None, 16))
        self.built = True

    def call(self, both: Any) -> Any:
        return self.dense(both["words"][:, 0] * tf.cast(both["numbers"][:, :1], "float32"))


@pytest.mark.ranks(2)
def test_several_tensors_cross_a_cut(ranks: Any) -> None:
    """Rows of an embedding have sparse gradients; whole numbers have none."""

    def check() -> None:
        pipeline = compiled(hvd.Pipeline([Pair, Joined], microbatches=3))
        first, second = Pair(), Joined()

        class Both(keras.Model):  # type: ignore[misc]
            def call(self, x: Any) -> Any:
                return second(first(x))

        model = Both()
        model.parts = [first, second]
        compiled(model)
        for each in (pipeline, model):
            each.fit(TOKENS, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        assert_equal(pipeline.full_weights(), model)

    ranks(check)


def test_sums_of_losses(ranks: Any) -> None:
    def check() -> None:
        plain = [keras.Input((WIDTH,)), *(dense(WIDTH, seed) for seed in range(hvd.size())), dense(3, 9)]
        stages = [[keras.Input((WIDTH,)), dense(WIDTH, seed)] for seed in range(hvd.size())]
        stages[-1].append(dense(3, 9))
        pipeline = compiled(hvd.Pipeline([keras.Sequential(stage) for stage in stages], 2))
        model = compiled(keras.Sequential(plain))
        for each in (pipeline, model):
            compiled(each, loss=keras.losses.MeanSquaredError("sum"), optimizer=keras.optimizers.SGD(1e-3))
            each.fit(X, Y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
        assert_equal(pipeline.full_weights(), model)

    ranks(check)


def test_wrong_arguments(ranks: Any) -> None:
    def check() -> None:
        size = hvd.size()
        made = [keras.Sequential(part) for part in parts(size)]
        idle = keras.Sequential([keras.Input((2,)), layers.ReLU()])
        refused: list[tuple[str, Callable[[], Any]]] = [
            (f"{size + 1} stages for {size} rank", lambda: hvd.Pipeline([*made, made[0]])),
            ("microbatches=0", lambda: hvd.Pipeline(made, 0)),
            (r"stage 0 .* is not built", lambda: hvd.Pipeline([keras.Sequential([dense(2, 0)]), *made[1:]])),
            (
                f"stage {size - 1} .* has no weights",
                lambda: hvd.Pipeline([*made[:-1], idle]),
            ),
            ("stage 0 is a int", lambda: hvd.Pipeline([3, *made[1:]])),  # type: ignore[list-item]
        ]
        for text, call in refused:
            with pytest.raises(ArgumentError, match=text):
                call()
        pipeline = compiled(hvd.Pipeline(made, 5))
        with pytest.raises(ArgumentError, match="24 samples cannot be cut into 5 equal micro-batches.*20 would do"):
            pipeline.fit(X, Y, batch_size=BATCH, verbose=0)
        with pytest.raises(ArgumentError, match="leave out jit_compile"):
            compiled(pipeline, jit_compile=True)
        with pytest.raises(ArgumentError, match="full_weights"):
            pipeline.save("here.keras")
        with pytest.raises(ArgumentError, match=r"trained by fit\(\)"):
            pipeline(X, training=True)
        pipeline = hvd.Pipeline(made, 2)
        compiled(pipeline, loss=keras.losses.MeanSquaredError("mean_with_sample_weight"))
        with pytest.raises(ArgumentError, match="mean_with_sample_weight"):
            pipeline.fit(X, Y, verbose=0)

    ranks(check)


@pytest.mark.ranks(1)
def test_masks_are_refused(ranks: Any) -> None:
    def check() -> None:
        stage = keras.Sequential([keras.Input((5,)), layers.Embedding(11, 3, mask_zero=True)])
        pipeline = hvd.Pipeline([stage], 2)
        pipeline.compile("sgd", "mse")
        with pytest.raises(UnsupportedTensorError, match="mask_zero=True"):
            pipeline.fit(TOKENS, np.zeros((ROWS, 5, 3)), verbose=0)

    ranks(check)


@pytest.mark.ranks(4)
def test_pipelines_side_by_side(ranks: Any) -> None:
    def check() -> None:
        grid = hvd.ProcessGrid(dp=2, pp=2)
        pipeline = hvd.Pipeline([keras.Sequential(part) for part in parts(2)], 2, grid["pp"])
        compiled(pipeline, optimizer=hvd.DistributedOptimizer(optimizer(), process_set=grid["dp"]))
        model = compiled(whole(2))
        half = np.arange(ROWS).reshape(2, 2, BATCH // 2)[:, grid.place["dp"]].reshape(-1)
        pipeline.fit(X[half], Y[half], batch_size=BATCH // 2, epochs=2, shuffle=False, verbose=0)
        model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        assert_equal(pipeline.full_weights(), model)
        for weight in pipeline.stage.get_weights():
            copies = hvdlite.allgather(weight.reshape(1, -1), process_set=grid["dp"])
            assert np.array_equal(copies[0], copies[1])

    ranks(check)


@hypothesis.given(st.integers(1, 6), st.integers(1, 9))
def test_every_stage_makes_every_pass(places: int, microbatches: int) -> None:
    for place in range(places):
        passes = one_forward_one_backward(place, places, microbatches)
        assert sorted(passes) == sorted((kind, n) for kind in (False, True) for n in range(microbatches))
        held = list(itertools.accumulate(1 if kind else -1 for kind, _ in passes))
        assert max(held) == min(places - place, microbatches)
        assert min(held) >= 0
        for kind in (False, True):
            assert [n for each, n in passes if each is kind] == list(range(microbatches))
