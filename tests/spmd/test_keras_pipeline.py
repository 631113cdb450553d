"""A Keras pipeline trains as the whole model does in one process; wrong arguments are named."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import hvdlite
import hvdlite_tf as hvd
from hvdlite.errors import ArgumentError, UnsupportedTensorError
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


@pytest.mark.costly
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("microbatches", [5, 1])
def test_fit_evaluate_and_predict(ranks: Any, microbatches: int) -> None:
    def check() -> None:
        size = hvd.size()
        model = compiled(whole(size))
        options = {"batch_size": 20, "epochs": 3, "shuffle": False, "verbose": 0, "sample_weight": IMPORTANCE}
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


LABELS = _rng.integers(0, 3, ROWS)
LABELS[:9] = LABELS[13:20] = LABELS[30:] = 1  # of which some are ignored
LOSSES: dict[str, tuple[Any, Any]] = {
    "sum": (lambda: keras.losses.MeanSquaredError("sum"), Y),
    "a function that returns a sum": (lambda: lambda y, p: tf.reduce_sum((y - p) ** 2), Y),
    "a function that returns a mean": (lambda: lambda y, p: tf.reduce_mean((y - p) ** 2), Y),
    "a mean by weights": (lambda: keras.losses.MeanSquaredError("mean_with_sample_weight"), Y),
    "ignored classes": (lambda: keras.losses.SparseCategoricalCrossentropy(True, ignore_class=1), LABELS),
}


@pytest.mark.costly
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_loss_counts(ranks: Any, loss: str) -> None:
    """Weights and the log are those of the whole batch; regularization counts once."""

    def check() -> None:
        size, (make, y) = hvd.size(), LOSSES[loss]
        pipeline = hvd.Pipeline([keras.Sequential(part) for part in parts(size)], 5)
        model = whole(size)
        options = {"batch_size": 20, "epochs": 1, "shuffle": False, "verbose": 0}
        if y is Y and getattr(make(), "reduction", "").startswith("mean"):
            options["sample_weight"] = IMPORTANCE[:35]
        logs = [
            compiled(each, loss=make(), optimizer=keras.optimizers.SGD(2e-3), metrics=[]).fit(
                X[:35], y[:35], validation_data=(X[:15], y[:15]), **options
            )
            for each in (pipeline, model)
        ]
        assert_equal(pipeline.full_weights(), model)
        for name, values in logs[1].history.items():
            np.testing.assert_allclose(logs[0].history[name], values, rtol=1e-5)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_a_loss_that_is_no_mean_over_samples(ranks: Any) -> None:
    def check() -> None:
        pipeline = hvd.Pipeline([keras.Sequential(part) for part in parts(hvd.size())], 5)
        compiled(pipeline, loss=lambda y, p: tf.reduce_sum((y - p) ** 2) / tf.reduce_sum(tf.abs(y)))
        with pytest.raises(ArgumentError, match="the loss is no mean over samples.*Return one number for each sample"):
            pipeline.fit(X, Y, batch_size=20, verbose=0)

    ranks(check)


class Breaks(layers.Layer):  # type: ignore[misc]
    """Raises if its rank says so."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.fails = place, False

    def call(self, x: Any) -> Any:
        return tf.ensure_shape(tf.py_function(self._maybe, [x], x.dtype), x.shape)

    def _maybe(self, x: Any) -> Any:
        if self.fails:
            raise KeyError("too hot")
        return x


@pytest.mark.ranks(at_least=2)
def test_an_error_on_one_rank_is_raised_on_all(ranks: Any) -> None:
    def check() -> None:
        size = hvd.size()
        breaks = [Breaks(place) for place in range(size)]
        stages = [keras.Sequential([*part, breaks[place]]) for place, part in enumerate(parts(size))]
        pipeline = compiled(hvd.Pipeline(stages, 3), optimizer=keras.optimizers.SGD(0.0), metrics=[])
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        expected = pipeline.evaluate(X, Y, batch_size=BATCH, verbose=0)
        for place in range(size):
            breaks[place].fails = hvd.rank() == place
            own = hvd.rank() == place
            for call in (
                lambda: pipeline.fit(X, Y, **options),
                lambda: pipeline.evaluate(X, Y, batch_size=BATCH, verbose=0),
                lambda: pipeline.predict_on_batch(X),
            ):
                with pytest.raises(
                    Exception if own else hvdlite.errors.HvdliteError,
                    match="too hot" if own else f"(?s)rank {place} could not make this step.*too hot",
                ):
                    call()
            breaks[place].fails = False
        with pytest.raises(hvdlite.errors.HvdliteError, match="called with different batches"):
            pipeline.train_on_batch(X[: 2 if hvd.rank() else 9], Y[: 2 if hvd.rank() else 9])
        np.testing.assert_allclose(pipeline.evaluate(X, Y, batch_size=BATCH, verbose=0), expected, rtol=1e-6)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_an_error_in_the_step_of_one_optimizer_is_raised_on_all(ranks: Any) -> None:
    def check() -> None:
        pipeline = compiled(hvd.Pipeline([keras.Sequential(part) for part in parts(hvd.size())], 3))
        last = hvd.size() - 1
        if hvd.rank() == last:
            pipeline.optimizer.apply = operator.truediv  # not of lists
        with pytest.raises(
            TypeError if hvd.rank() == last else hvdlite.errors.HvdliteError,
            match="unsupported operand" if hvd.rank() == last else f"^rank {last} could not make .*: TypeError",
        ):
            pipeline.train_on_batch(X[:BATCH], Y[:BATCH])

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_variables_that_no_stage_has_are_refused(ranks: Any) -> None:
    """Nobody would train them. A variable that is constant, and a frozen weight, may be used."""

    def check() -> None:
        size = hvd.size()
        noise, constant = tf.Variable(0.5, name="noise"), tf.Variable(0.5, trainable=False)
        counter = tf.Variable(0.0, name="counter")

        class Scales(layers.Layer):  # type: ignore[misc]
            by: Any = constant

            def call(self, x: Any) -> Any:
                return x * self.by

        def error(y: Any, p: Any, by: Any = 1.0) -> Any:
            return tf.reduce_mean((y - p) ** 2, -1) * by

        def counted(y: Any, p: Any) -> Any:
            return error(y, p) + 0.0 * tf.stop_gradient(counter.assign_add(1.0) + counter)

        def made(scales: Any) -> Any:
            stages = [keras.Sequential(part) for part in parts(size)]
            stages[0].add(scales)
            return stages, hvd.Pipeline(stages, 2)

        stages, pipeline = made(Scales())
        if hvd.rank() == size - 1:
            stages[-1].layers[-1].trainable = False
            stages[-1].add(dense(3, 3))
        penalized = stages[0].layers[0].kernel
        for loss, text in (
            (lambda y, p: error(y, p, tf.exp(noise)), r"the loss, or .*'noise:0' of shape \(\), which can be trained"),
            (lambda y, p: error(y, p) + tf.reduce_sum(penalized**2), r"of shape \(8, 16\), which can be trained"),
            (lambda y, p: error(y, p, constant), None),
            (counted, None),
        ):
            compiled(pipeline, loss=loss)
            before = pipeline.full_weights()
            if text is None:
                pipeline.fit(X, Y, batch_size=BATCH, verbose=0)
                continue
            with pytest.raises(hvdlite.errors.HvdliteError, match=text):
                pipeline.fit(X, Y, batch_size=BATCH, verbose=0)
            assert all(map(np.array_equal, sum(before, []), sum(pipeline.full_weights(), [])))  # noqa: RUF017
        scales = Scales()
        scales.by = noise
        with pytest.raises(hvdlite.errors.HvdliteError, match="stage 0, uses the variable 'noise:0'"):
            compiled(made(scales)[1]).fit(X, Y, batch_size=BATCH, verbose=0)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_a_layer_of_two_stages_is_refused(ranks: Any) -> None:
    def check() -> None:
        def stage(*shared: Any) -> keras.Model:
            return keras.Sequential([keras.Input((4,)), *shared, dense(4, 1)])

        others = [lambda: stage()] * (hvd.size() - 2)
        for shared in (dense(4, 5), layers.BatchNormalization(), keras.Sequential([dense(4, 5)])):
            given: list[list[Any]] = [
                [stage(shared), stage(shared)],
                [lambda shared=shared: stage(shared), lambda shared=shared: stage(shared)],
                [functools.partial(stage, shared), functools.partial(stage, shared)],
                [lambda: stage(shared), stage(shared)],  # noqa: B023
            ]
            for first, last in given:
                with pytest.raises(ArgumentError, match=r"the stages \[0, .*\] have '.*' both.*in one stage"):
                    hvd.Pipeline([first, *others, last])
        # What has no weights, and other parts of one model, are no copies.
        relu, model, parts_of_it = layers.ReLU(), stage(dense(4, 2), dense(4, 3)), (slice(1), slice(1, 3))
        cuts = [lambda part=part: keras.Sequential([keras.Input((4,)), *model.layers[part]]) for part in parts_of_it]
        hvd.Pipeline([lambda: stage(relu), *others, lambda: stage(relu)])
        if hvd.size() == 2:
            hvd.Pipeline(cuts)

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
        with pytest.raises(ArgumentError, match="leave out jit_compile"):
            compiled(pipeline, jit_compile=True)
        with pytest.raises(ArgumentError, match="full_weights"):
            pipeline.save("here.keras")
        with pytest.raises(ArgumentError, match=r"trained by fit\(\)"):
            pipeline(X, training=True)
        pipeline = hvd.Pipeline(made, 2)
        compiled(pipeline, loss=keras.losses.MeanSquaredError(None))
        with pytest.raises(ArgumentError, match="a loss with reduction None"):
            pipeline.fit(X, Y, verbose=0)
        with pytest.raises(ArgumentError, match="there are no samples"):
            pipeline.predict_on_batch(X[:0])

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


def clipping() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05)


def test_global_clipnorm_is_over_all_stages(ranks: Any) -> None:
    def check() -> None:
        count = hvd.size()
        pipeline = compiled(hvd.Pipeline([keras.Sequential(part) for part in parts(count)], 2), optimizer=clipping())
        model = compiled(whole(count), optimizer=clipping())
        for each in (pipeline, model):
            each.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        assert_equal(pipeline.full_weights(), model)

    ranks(check)


@pytest.mark.costly
@pytest.mark.ranks(4)
@pytest.mark.parametrize("options", [{"shard": True}, {}], ids=str)
@pytest.mark.parametrize("optimizer", [clipping, optimizer])
@pytest.mark.slow
def test_pipelines_side_by_side(ranks: Any, optimizer: Callable[[], Any], options: dict[str, Any]) -> None:
    def check() -> None:
        grid = hvd.ProcessGrid(dp=2, pp=2)
        pipeline = hvd.Pipeline([keras.Sequential(part) for part in parts(2)], 2, grid["pp"])
        compiled(pipeline, optimizer=hvd.DistributedOptimizer(optimizer(), process_set=grid["dp"], **options))
        model = compiled(whole(2), optimizer=optimizer())
        half = np.arange(ROWS).reshape(2, 2, BATCH // 2)[:, grid.place["dp"]].reshape(-1)
        pipeline.fit(X[half], Y[half], batch_size=BATCH // 2, epochs=2, shuffle=False, verbose=0)
        model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        assert_equal(pipeline.full_weights(), model)
        for weight in pipeline.stage.get_weights():
            copies = hvdlite.allgather(weight.reshape(1, -1), process_set=grid["dp"])
            assert np.array_equal(copies[0], copies[1])

    ranks(check)
