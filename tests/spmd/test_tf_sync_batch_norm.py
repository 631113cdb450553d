"""SyncBatchNormalization against Keras' batch normalisation on the joined batch."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.errors import ArgumentError, NotInitializedError
from hvdlite_tf.training.sync_batch_norm import synchronized
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # Ranks that are threads share TensorFlow's pool: it needs a thread for each rank that waits for the others.
    tf.config.threading.set_inter_op_parallelism_threads(8)

CHANNELS = 3
Lengths = Callable[[int], list[int]]
LENGTHS: dict[str, Lengths] = {
    "even": lambda size: [4] * size,
    "uneven": lambda size: [2 + 3 * rank for rank in range(size)],
    "empty on the first rank": lambda size: [0] + [3] * (size - 1) if size > 1 else [3],
}


def batches_of(lengths: list[int], shape: tuple[int, ...], dtype: str, seed: int) -> list[np.ndarray]:
    """For each rank a batch of other mean and variance than the others'."""
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((n, *shape)) * (r + 1) + r).astype(dtype) for r, n in enumerate(lengths)]


def run(layer: Any, batch: Any, upstream: Any, graph: bool, **options: Any) -> list[Any]:
    """The output, the gradient of the input, and those of gamma and beta; all as arrays."""

    def step(x: Any, weights: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = layer(x, training=True, **options)
            target = tf.reduce_sum(output * weights)
        return output, *tape.gradient(target, [x, *(each.value for each in layer.trainable_weights)])

    step = tf.function(step) if graph else step
    return [np.asarray(each) for each in step(tf.constant(batch), tf.constant(upstream))]


def shuffled(layer: Any, *shape: int) -> Any:
    """`layer`, built for samples of this shape, with other weights than it begins with."""
    layer.build((None, *shape))
    layer.gamma.assign([0.5, 1.0, 2.0])
    layer.beta.assign([1.0, -1.0, 0.0])
    return layer


@pytest.mark.parametrize(
    ("lengths", "shape", "axis", "dtype", "graph"),
    [
        ("even", (CHANNELS,), -1, "float32", False),
        ("uneven", (2, CHANNELS), -1, "float64", True),
        ("uneven", (CHANNELS, 2), 1, "float32", True),
        ("empty on the first rank", (CHANNELS,), -1, "float64", False),
        ("empty on the first rank", (2, CHANNELS), -1, "float32", True),
    ],
)
def test_equals_batch_norm_on_the_joined_batch(
    ranks: Any, lengths: str, shape: tuple[int, ...], axis: int, dtype: str, graph: bool
) -> None:
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == "float64" else {"rtol": 3e-5, "atol": 3e-5}

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        options = {"axis": axis, "dtype": dtype, "momentum": 0.5}
        joined = shuffled(keras.layers.BatchNormalization(**options), *shape)
        layer = shuffled(hvd.SyncBatchNormalization(**options), *shape)
        for step in range(2):
            batches = batches_of(LENGTHS[lengths](size), shape, dtype, seed=step)
            starts = np.cumsum([0, *map(len, batches)])
            mine = slice(starts[rank], starts[rank + 1])
            everything = np.concatenate(batches)
            upstream = np.sin(np.arange(everything.size)).reshape(everything.shape).astype(dtype)
            expected = run(joined, everything, upstream, False)
            output, of_input, *of_weights = run(layer, batches[rank], upstream[mine], graph)
            assert np.allclose(output, expected[0][mine], **tolerance)
            assert np.allclose(of_input, expected[1][mine], **tolerance)
            for ours, theirs in zip(of_weights, expected[2:], strict=True):
                # Of all ranks together; those of the samples of one rank are one term.
                assert np.allclose(sum(hvd.allgather_object(ours)), theirs, **tolerance)
            for ours, theirs in zip(layer.non_trainable_weights, joined.non_trainable_weights, strict=True):
                assert np.allclose(ours.numpy(), theirs.numpy(), **tolerance)
        if rank == 0:  # in evaluation no other rank takes part
            assert np.allclose(layer(everything), joined(everything), **tolerance)

    ranks(check)


def test_masks(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        batches = [batch.reshape(-1, 3, CHANNELS) for batch in batches_of([6] * size, (CHANNELS,), "float64", 0)]
        masks = [np.arange(6).reshape(-1, 3) % (2 + r) > 0 for r in range(size)]
        for batch, mask in zip(batches, masks, strict=True):
            batch[~mask] = np.nan  # what is left out may be anything
        let_through = np.concatenate([batch[mask] for batch, mask in zip(batches, masks, strict=True)])
        layer = shuffled(hvd.SyncBatchNormalization(dtype="float64", momentum=0.0), 3, CHANNELS)
        layer(batches[rank], training=True, mask=masks[rank])
        assert np.allclose(layer.moving_mean.numpy(), let_through.mean(0))
        assert np.allclose(layer.moving_variance.numpy(), let_through.var(0))

    ranks(check)


def test_a_mean_far_larger_than_the_deviations(ranks: Any) -> None:
    def check() -> None:
        size, rank = hvd.size(), hvd.rank()
        everything = (np.random.default_rng(0).normal(size=(64 * size, CHANNELS)) + 1e3).astype("float32")
        layer = hvd.SyncBatchNormalization(momentum=0.0)
        layer(everything[64 * rank :][:64], training=True)
        exact = (everything.astype(np.longdouble) - 1e3).var(axis=0)
        assert np.allclose(layer.moving_variance.numpy(), exact.astype(float), rtol=1e-4)

    ranks(check)


def train(rank: int, size: int, kind: Callable[[], Any], wrap: Callable[[Any], Any]) -> np.ndarray:
    """Eight steps of a network with two such layers; all weights, flat."""
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal((8, 12, 4)).astype("float32"), rng.standard_normal((8, 12, 1)).astype("float32")
    layers = [keras.layers.Dense(8), kind(), keras.layers.Dense(8, "tanh"), kind(), keras.layers.Dense(1)]
    for layer, width in zip(layers, (4, 8, 8, 8, 8), strict=True):
        layer.build((None, width))
        for weight in layer.weights:
            weight.assign(rng.standard_normal(weight.shape) ** 2 * 0.3 - (len(weight.shape) - 1) * 0.3)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    variables = [weight for layer in layers for weight in layer.trainable_weights]
    optimizer.build(variables)

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            for layer in layers:
                x = layer(x, training=True)
            loss = tf.reduce_mean(tf.square(x - y))
        optimizer.apply_gradients(zip(wrap(tape).gradient(loss, variables), variables, strict=True))

    share = slice(rank * 12 // size, (rank + 1) * 12 // size)
    for batch, truth in zip(x[:, share], y[:, share], strict=True):
        step(tf.constant(batch), tf.constant(truth))
    return np.concatenate([weight.numpy().ravel() for layer in layers for weight in layer.weights])


@functools.cache
def trained_by_one() -> np.ndarray:
    return train(0, 1, keras.layers.BatchNormalization, lambda tape: tape)


@pytest.mark.ranks(at_most=3)
def test_training_equals_one_process_on_the_joined_batch(ranks: Any) -> None:
    expected = trained_by_one()

    def check() -> None:
        got = train(hvd.rank(), hvd.size(), hvd.SyncBatchNormalization, hvd.DistributedGradientTape)
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()

    ranks(check)


LOAD = """
import sys
sys.modules["hvdlite"] = sys.modules["hvdlite_tf"] = None  # an import of these fails
import keras
plain = keras.layers.BatchNormalization
model = keras.models.load_model(sys.argv[1], custom_objects={"hvdlite>SyncBatchNormalization": plain})
assert type(model.layers[0]) is plain and model.layers[0].momentum == 0.25
"""


@pytest.mark.slow
@pytest.mark.skipif(UNDER_MPI, reason="about files, not about ranks; done once, on threads")
def test_it_is_saved_with_a_model(tmp_path: Any) -> None:
    file = str(tmp_path / "model.keras")
    model = keras.Sequential([keras.layers.Input((4,)), hvd.SyncBatchNormalization(momentum=0.25)])
    model.save(file)
    loaded = keras.models.load_model(file).layers[0]
    assert type(loaded) is hvd.SyncBatchNormalization and loaded.momentum == 0.25
    assert type(keras.models.clone_model(model).layers[0]) is hvd.SyncBatchNormalization
    done = subprocess.run([sys.executable, "-c", LOAD, file], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_tf_keras(ranks: Any) -> None:
    tf_keras = pytest.importorskip("tf_keras")
    kind = synchronized(tf_keras.layers.BatchNormalization)

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        batches = batches_of([2 + r for r in range(size)], (2, 2, CHANNELS), "float32", 0)
        joined = tf_keras.layers.BatchNormalization(momentum=0.5, fused=False)
        layer = kind(momentum=0.5)
        assert isinstance(layer, tf_keras.layers.BatchNormalization)
        expected = joined(np.concatenate(batches), training=True)
        start = sum(map(len, batches[:rank]))
        output = layer(batches[rank], training=True)
        assert np.allclose(output, expected[start : start + len(batches[rank])], rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(layer.get_weights(), joined.get_weights(), strict=True):
            assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-5)

    ranks(check)


@pytest.mark.ranks(at_least=3)
def test_a_process_set(ranks: Any) -> None:
    def check() -> None:
        pair = hvd.add_process_set([0, hvd.size() - 1])
        if pair.included():
            layer = hvd.SyncBatchNormalization(momentum=0.0, process_set=pair)
            layer(tf.fill([2, 1], float(hvd.rank())), training=True)
            assert np.allclose(layer.moving_mean.numpy(), (hvd.size() - 1) / 2)
        hvd.barrier()
        hvd.remove_process_set(pair)

    ranks(check)


def test_bad_use() -> None:
    with pytest.raises(ArgumentError, match="no fused form"):
        hvd.SyncBatchNormalization(fused=True)
    with pytest.raises(ArgumentError, match="leave them out"):
        hvd.SyncBatchNormalization(renorm=True)
    with pytest.raises(ArgumentError, match="expected a batch normalisation layer"):
        synchronized(keras.layers.Dense)
    if not UNDER_MPI:
        layer = hvd.SyncBatchNormalization()
        assert layer(tf.ones((2, 2))).shape == (2, 2)
        with pytest.raises(NotInitializedError):
            layer(tf.ones((2, 2)), training=True)


@pytest.mark.parametrize("graph", [False, True])
def test_gradients_of_gradients_are_those_of_the_joined_batch(ranks: Any, graph: bool) -> None:
    def penalised(layer: Any, kernel: tf.Variable, x: tf.Tensor) -> Any:
        """The gradients of the loss of a critic whose gradient should have length 1 for each row (WGAN-GP)."""
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                scores = tf.reduce_sum(tf.tanh(layer(x, training=True)) @ kernel)
            slopes = inner.gradient(scores, x)
            loss = scores + 10 * tf.reduce_sum(tf.square(tf.norm(slopes, axis=1) - 1))
        return outer.gradient(loss, [layer.gamma.value, kernel])

    def check() -> None:
        batches = batches_of(LENGTHS["uneven"](hvd.size()), (CHANNELS,), "float64", seed=0)
        found = []
        for kind, x in (
            (keras.layers.BatchNormalization, np.concatenate(batches)),
            (hvd.SyncBatchNormalization, batches[hvd.rank()]),
        ):
            layer = shuffled(kind(dtype="float64"), CHANNELS)
            kernel = tf.Variable([[1.0], [-0.5], [0.3]], dtype=tf.float64)
            step = tf.function(penalised) if graph else penalised
            found.append([np.asarray(each) for each in step(layer, kernel, tf.constant(x))])
        for expected, own in zip(*found, strict=True):
            assert np.allclose(sum(hvd.allgather_object(own)), expected, rtol=1e-9, atol=1e-9)

    ranks(check)
