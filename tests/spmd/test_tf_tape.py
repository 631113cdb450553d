"""DistributedGradientTape: loops of one's own on several ranks equal those in one process on the joined batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.errors import ArgumentError, MismatchError
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # Ranks that are threads share TensorFlow's pool: it needs a thread for each rank that waits for the others.
    tf.config.threading.set_inter_op_parallelism_threads(8)

STEPS, ROWS = 20, 12
_rng = np.random.default_rng(3)
X = _rng.standard_normal((STEPS, ROWS, 5)).astype("float32")
Y = _rng.standard_normal((STEPS, ROWS, 2)).astype("float32")
WEIGHTS = [_rng.standard_normal(shape).astype("float32") * 0.5 for shape in [(5, 8), (8,), (8, 2)]]

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-2),
}


def train(kind: str, graph: bool, rank: int, size: int, wrap: Callable[..., Any]) -> np.ndarray:
    """20 steps on this rank's equal share of each batch; all weights, flat."""
    first, bias, second = variables = [tf.Variable(weight) for weight in WEIGHTS]
    optimizer = OPTIMIZERS[kind]()
    optimizer.build(variables)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ first + bias) @ second - y))
        gradients = wrap(tape).gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    run = tf.function(step) if graph else step
    share = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    for x, y in zip(X[:, share], Y[:, share], strict=True):
        run(tf.constant(x), tf.constant(y))
    return np.concatenate([variable.numpy().ravel() for variable in variables])


@functools.cache
def single(kind: str) -> np.ndarray:
    return train(kind, True, 0, 1, lambda tape: tape)


@pytest.mark.parametrize(("kind", "graph"), [("sgd", False), ("sgd", True), ("adam", True)])
def test_a_loop_equals_one_process_on_the_joined_batch(ranks: Any, kind: str, graph: bool) -> None:
    expected = single(kind)

    def check() -> None:
        got = train(kind, graph, hvd.rank(), hvd.size(), hvd.DistributedGradientTape)
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
        assert all(np.array_equal(got, other) for other in hvd.allgather_object(got))

    ranks(check)


def gradient(sources: Any, loss: Callable[[], Any], graph: bool = False, **options: Any) -> Any:
    """Of the loss, by a distributed tape."""

    def compute() -> Any:
        with tf.GradientTape() as tape:
            tape.watch([s for s in tf.nest.flatten(sources) if isinstance(s, tf.Tensor)])
            target = loss()
        return hvd.DistributedGradientTape(tape, **options).gradient(target, sources)

    return (tf.function(compute) if graph else compute)()


@pytest.mark.parametrize("graph", [False, True])
def test_the_structure_of_sources_stays(ranks: Any, graph: bool) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        a, b, unused = tf.Variable([1.0, 2.0]), keras.Variable(3.0), tf.Variable(1.0)
        tensor = tf.constant([1.0, 1.0, 1.0])
        sources = {"a": a, "more": (b, [unused, tensor])}
        found = gradient(
            sources, lambda: tf.reduce_sum(a) * (rank + 1) + b.value * rank + tf.reduce_sum(tensor) * 2.0 * rank, graph
        )
        assert list(found) == ["a", "more"] and isinstance(found["more"], tuple)
        of_b, (of_unused, of_tensor) = found["more"]
        assert of_unused is None
        assert np.allclose(found["a"], [(size + 1) / 2] * 2)
        assert np.allclose(of_b, (size - 1) / 2)
        assert np.allclose(of_tensor, [size - 1] * 3)
        alone = gradient(a, lambda: tf.reduce_sum(a) * rank, graph, op=hvd.Sum)
        assert np.allclose(alone, [size * (size - 1) / 2] * 2)

    ranks(check)


@pytest.mark.parametrize("graph", [False, True])
def test_embeddings(ranks: Any, graph: bool) -> None:
    """Sparse gradients stay rows, those of all ranks; dense ones on demand."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        table = tf.Variable(tf.ones((6, 2)))
        rows = [rank, rank + 1, rank]

        def loss() -> Any:
            return tf.reduce_sum(tf.gather(table, rows)) * (rank + 1.0)

        expected = np.zeros((6, 2))
        for other in range(size):
            np.add.at(expected, [other, other + 1, other], (other + 1) / size)
        sparse = gradient(table, loss, graph)
        assert isinstance(sparse, tf.IndexedSlices)
        assert np.allclose(tf.convert_to_tensor(sparse), expected)
        dense = gradient(table, loss, graph, sparse_as_dense=True)
        assert not isinstance(dense, tf.IndexedSlices) and np.allclose(dense, expected)

    ranks(check)


def test_it_stays_a_tape(ranks: Any) -> None:
    class Mine(tf.GradientTape):  # type: ignore[misc]
        def more(self) -> str:
            return "more"

    def check() -> None:
        rank, mean = hvd.rank(), (hvd.size() - 1) / 2
        x = tf.Variable([2.0, 3.0])
        with Mine(persistent=True) as plain:
            y = x * x * float(rank)
        tape = hvd.DistributedGradientTape(plain)
        assert isinstance(tape, Mine) and type(tape).__name__ == "Mine" and tape.more() == "more"
        for _ in range(2):
            assert np.allclose(tape.gradient(y, x), [4 * mean, 6 * mean])
            assert np.allclose(plain.gradient(y, x), [4 * rank, 6 * rank])  # of this rank, and nobody else takes part
        assert np.allclose(tape.gradient(y, x, output_gradients=tf.constant([1.0, 10.0])), [4 * mean, 60 * mean])
        if rank == 0:  # these are of the rank's own batch
            assert np.allclose(tape.jacobian(y, x), np.diag([0, 0]))
        assert [each is x for each in tape.watched_variables()] == [True]
        zero = tape.gradient(y, tf.Variable(1.0), unconnected_gradients=tf.UnconnectedGradients.ZERO)
        assert zero.numpy() == 0

        with hvd.DistributedGradientTape(tf.GradientTape(watch_accessed_variables=False)) as tape:
            tape.watch(x)
            with tape.stop_recording():
                constant = x * 5.0
            y = x * constant * float(rank)
        assert np.allclose(tape.gradient(y, x), [10 * mean, 15 * mean])
        with pytest.raises(RuntimeError, match="non-persistent"):
            tape.gradient(y, x)
        with tf.GradientTape(persistent=True) as plain:
            tape = hvd.DistributedGradientTape(plain)  # while it records
            batch = tf.ones((3, 2)) * x * x
            tape.reset()
            batch = tf.ones((3, 2)) * x * x * x
        assert tape.batch_jacobian(batch, tf.ones((3, 2)) * x, unconnected_gradients="zero").shape == (3, 2, 2)

    ranks(check)


@pytest.mark.parametrize("graph", [False, True])
def test_gradients_of_gradients(ranks: Any, graph: bool) -> None:
    """Rank r has the loss k·x³ with k = r + 1; the mean gradient is g = 3·mean(k)·x², and all ranks' sums of g² depend on x."""

    def check() -> None:
        size, k = hvd.size(), float(hvd.rank() + 1)
        x = tf.Variable([2.0, -1.0])

        def compute() -> Any:
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = k * tf.reduce_sum(x**3)
                mean = hvd.DistributedGradientTape(inner).gradient(loss, x)
                penalty = tf.reduce_sum(mean**2)
            return outer.gradient(penalty, x)

        found = tf.function(compute)() if graph else compute()
        # Σ over ranks s of d(Σg²)/d(own gradient of rank r) · d(own)/dx = size · 2g/size · 6kx
        expected = 2 * (3 * (size + 1) / 2 * np.array([4.0, 1.0])) * 6 * k * np.array([2.0, -1.0])
        assert np.allclose(found, expected)

    ranks(check)


@pytest.mark.parametrize("scale", [True, False])
def test_local_sources(ranks: Any, scale: bool) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        shared, local = tf.Variable(1.0), tf.Variable(tf.ones(rank + 1))  # a local one may differ in shape
        share = size if scale else 1
        with tf.GradientTape() as tape:
            loss = shared * rank + tf.reduce_sum(local) * (rank + 1.0)
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        tape.register_local_source(local)
        ((of, of_local),), ((other, of_shared),) = tape.get_local_and_global_gradients(loss, [local, shared])
        assert of is local and other is shared
        assert np.allclose(of_shared, (size - 1) / 2)
        assert np.allclose(of_local, [(rank + 1) / share] * (rank + 1))

        layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)]
        model = keras.Sequential([keras.layers.Input((1,)), *layers])

        @tf.function
        def compute() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(tf.fill([1, 1], rank + 1.0)))
            tape = hvd.PartialDistributedGradientTape(tape, local_layers=layers[0], scale_local_gradients=scale)
            return tape.gradient(loss, model.trainable_variables)

        first, second = compute()
        assert np.allclose(first, (rank + 1) / share)
        assert np.allclose(second, (size + 1) / 2)

    ranks(check)


def test_options(ranks: Any) -> None:
    def check() -> None:
        size = hvd.size()
        x = tf.Variable(tf.zeros(3))
        for options in (
            {"compression": hvd.Compression.fp16},
            {"gradient_predivide_factor": float(size)},
            {"groups": 2},
        ):
            found = gradient(x, lambda: tf.reduce_sum(x) * (hvd.rank() + 1.0), **options)
            assert found.dtype == tf.float32 and np.allclose(found, (size + 1) / 2)
        for _ in range(2 if size > 2 else 0):  # a set of the same ranks, once more
            pair = hvd.add_process_set([0, size - 1])
            if pair.included():
                found = gradient(x, lambda: tf.reduce_sum(x) * float(hvd.rank()), process_set=pair, op=hvd.Sum)
                assert np.allclose(found, size - 1)
            hvd.barrier()
            hvd.remove_process_set(pair)

    ranks(check)


def test_bad_use(ranks: Any) -> None:
    def check() -> None:
        rank = hvd.rank()
        x = tf.Variable([1.0])
        tape = hvd.DistributedGradientTape(tf.GradientTape())
        with pytest.raises(ArgumentError, match="distributed already"):
            hvd.DistributedGradientTape(tape)
        with pytest.raises(ArgumentError, match="expected a tf.GradientTape; got list"):
            hvd.DistributedGradientTape([])
        with pytest.raises(ArgumentError, match="expected a variable"):
            tape.register_local_source("x")
        with pytest.raises(ArgumentError, match="Average or Sum"):
            gradient(x, lambda: x * 2.0, op=hvd.Max)
        layer = keras.layers.Dense(1)
        with pytest.raises(ArgumentError, match="no variables yet"):
            hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[layer])
        with pytest.raises(ArgumentError, match="expected layers of Keras; got str"):
            hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers="ab")
        if hvd.size() > 1:
            y = tf.Variable(tf.ones(11 + rank))  # a layout that no rank has memory for yet
            for graph in (False, True):
                with pytest.raises(
                    Exception if graph else MismatchError, match="gradient buckets"
                ):  # AutoGraph wraps it
                    gradient(y, lambda: tf.reduce_sum(y), graph)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(tf.gather(x, [0, 0]) ** 2)
            rows = hvd.DistributedGradientTape(inner).gradient(loss, x)
            dense = tf.convert_to_tensor(rows) * 2.0
        with pytest.raises(ArgumentError, match="sparse_as_dense=True"):
            outer.gradient(dense, x)

    ranks(check)
