"""What programs for Horovod do with gradients under its names: against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as own
from hvdlite.config import Config
from hvdlite.errors import MismatchError
from hvdlite.testing import on_ranks
from hvdlite_tf import horovod as theirs
from hvdlite_tf.horovod import keras as theirs_keras
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: ranks that are threads share TensorFlow's pool.
    tf.config.threading.set_inter_op_parallelism_threads(8)


# Gradients of operations


def gradient_of(operation: Callable[..., Any], rows: int, **options: Any) -> Any:
    """That of the sum of (result × (1 + the number of its row)), times (1 + rank)."""
    x = tf.fill([rows, 2], tf.constant(float(own.rank()), tf.float64))
    with tf.GradientTape() as tape:
        tape.watch(x)
        result = operation(x, **options)
        weights = tf.range(1, tf.shape(result)[0] + 1)[:, None]
        loss = tf.reduce_sum((1.0 + own.rank()) * result * tf.cast(weights, tf.float64))
    return tape.gradient(loss, x)[:, 0].numpy()


@pytest.mark.parametrize("graph", [False, True])
def test_gradients_of_operations(ranks: Any, graph: bool) -> None:
    def check() -> None:
        rank, size = own.rank(), own.size()
        everybody, root = sum(range(1, size + 1)), size - 1
        gathered = everybody * np.arange(1.0, 2 * size + 1)[2 * rank : 2 * rank + 2]
        sent = everybody * np.array([1.0, 2.0]) * (rank == root)
        scattered = np.repeat(1.0 + np.arange(size), 1)
        lazily = tf.function if graph else lambda function: function
        for operation, truth, options in (
            (own.allgather, gathered, {}),
            (theirs.allgather, gathered / size, {}),
            (theirs_keras.allgather, gathered / size, {}),
            (lambda x: theirs.grouped_allgather([x])[0], gathered / size, {}),
            (own.broadcast, sent, {"root_rank": root}),
            (theirs.broadcast, sent / size, {"root_rank": root}),
            (theirs_keras.broadcast, sent / size, {"root_rank": root}),
        ):
            assert gradient_of(lazily(operation), 2, **options) == pytest.approx(truth)
        for operation, factor in (
            (own.reducescatter, 1.0),
            (theirs.reducescatter, size),
            (theirs_keras.reducescatter, size),
        ):
            assert gradient_of(lazily(operation), size, op=own.Sum) == pytest.approx(factor * scattered)
        assert theirs.allgather(tf.constant([rank])).numpy().tolist() == list(range(size))

    ranks(check)


# Loops that compute gradients by the optimizer


def optimizers() -> dict[str, Callable[[], Any]]:
    import tf_keras

    return {
        "Keras 3": lambda: keras.optimizers.SGD(1.0),
        "tf_keras": lambda: tf_keras.optimizers.SGD(1.0),
        "legacy": lambda: tf_keras.optimizers.legacy.SGD(1.0),
    }


KINDS = ["Keras 3", "tf_keras", "legacy"]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_the_optimizer(ranks: Any, kind: str, graph: bool) -> None:
    """They are those of all ranks, infinite ones too, and are applied as they are."""

    def check() -> None:
        rank, size = own.rank(), own.size()
        optimizer = theirs.DistributedOptimizer(optimizers()[kind]())
        variables = [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]

        def step(scale: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = sum(tf.reduce_sum(variable) * scale * (1.0 + rank) for variable in variables)
            pairs = optimizer._compute_gradients(loss, variables, tape=tape)
            optimizer.apply_gradients(pairs)
            return [gradient for gradient, _ in pairs]

        run = tf.function(step) if graph else step
        mean = (size + 1) / 2
        for _ in range(2):
            assert all(np.allclose(each, mean) for each in run(tf.constant(1.0)))
        assert np.allclose(variables[0], np.array([1.0, 2.0]) - 2 * mean) and np.allclose(variables[1], 3 - 2 * mean)
        assert optimizer.iterations.numpy() == 2
        infinite = run(tf.constant(np.inf if rank == size - 1 else 1.0))
        assert all(np.isinf(each).all() for each in infinite)
        with pytest.raises(ValueError, match="`tape` is required"):
            optimizer._compute_gradients(tf.constant(1.0), variables)
        (pair,) = optimizer._compute_gradients(lambda: tf.reduce_sum(variables[1] * (1.0 + rank)), [variables[1]])
        assert np.allclose(pair[0], mean) and pair[1] is variables[1]

    ranks(check)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_are_added_up(ranks: Any, kind: str) -> None:
    def check() -> None:
        rank, size = own.rank(), own.size()
        optimizer = theirs.DistributedOptimizer(
            optimizers()[kind](), backward_passes_per_step=2, average_aggregated_gradients=True, op=own.Sum
        )
        variable = tf.Variable([0.0])

        @tf.function
        def step(factor: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable) * factor * (1.0 + rank)
            optimizer.apply_gradients(optimizer._compute_gradients(loss, [variable], tape=tape))

        total = size * (size + 1) / 2
        for number, expected in enumerate([0.0, 2.0, 2.0, 2.0 + 3.0]):
            step(tf.constant([1.0, 3.0, 2.0, 4.0][number]))
            assert variable.numpy() == pytest.approx([-total * expected])

    ranks(check)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graph", [False, True])
def test_rates_that_differ_before_the_first_broadcast_are_told(ranks: Any, kind: str, graph: bool) -> None:
    """A first step fills the state, each rank by its own rate; then all ranks get the state of one."""

    def check() -> None:
        rank, size = own.rank(), own.size()
        mean = (size + 1) / 2
        optimizer = theirs.DistributedOptimizer(optimizers()[kind]())
        optimizer.learning_rate = 0.1 * (1 + rank)
        variable = tf.Variable([0.0])

        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable) * (1.0 + rank)
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

        run = tf.function(step) if graph else step
        for number in (1, 2):
            run()
            assert variable.numpy() == pytest.approx([-number * 0.1 * (1 + rank) * mean])
        optimizer.learning_rate = 0.1
        variable.assign([0.0])
        run()
        assert variable.numpy() == pytest.approx([-0.1 * mean])
        optimizer.learning_rate = 0.1 * (1 + rank)
        if size > 1:
            with pytest.raises(
                (MismatchError, tf.errors.UnknownError), match="the learning rates of the ranks differ: 0.1 on"
            ):
                run()

    ranks(check)


@pytest.mark.skipif(UNDER_MPI, reason="the test chooses the setting of its threads")
def test_rank_0_tells_which_rates_differ() -> None:
    def check() -> None:
        optimizer = theirs.DistributedOptimizer(keras.optimizers.SGD(0.1 * (1 + own.rank())))
        variable = tf.Variable([0.0])
        optimizer.apply_gradients([(tf.constant([1.0 + own.rank()]), variable)])

    with pytest.warns(RuntimeWarning, match="learning rates of the ranks differ: 0.1 on rank 0, 0.2 on rank 1") as told:
        on_ranks(2, check, config=Config(advice=True))
    assert len(told) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_local_layers(ranks: Any, kind: str) -> None:
    """Their gradients are this rank's own, divided by the number of ranks."""

    def check() -> None:
        import tf_keras

        rank, size = own.rank(), own.size()
        package = keras if kind == "Keras 3" else tf_keras
        layers = [package.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)]
        for layer in layers:
            layer.build((None, 1))
        optimizer = theirs_keras.PartialDistributedOptimizer(optimizers()[kind](), local_layers=layers[1:])
        variables = [layer.trainable_weights[0] for layer in layers]
        x = tf.fill([1, 1], 1.0 + rank)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layers[0](x) + layers[1](x))
        pairs = optimizer._compute_gradients(loss, variables, tape=tape)
        assert [float(gradient[0, 0]) for gradient, _ in pairs] == pytest.approx([(size + 1) / 2, (1 + rank) / size])
        optimizer.apply_gradients(pairs)
        after = [float(np.asarray(variable)[0, 0]) for variable in variables]
        assert after == pytest.approx([1 - (size + 1) / 2, 1 - (1 + rank) / size])

    ranks(check)


# Keras itself


@pytest.mark.filterwarnings("ignore:hvdlite. compile")
def test_what_keras_takes() -> None:
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    with pytest.warns(UserWarning, match="experimental_run_tf_function=.* is left out"):
        model.compile(keras.optimizers.SGD(0.1), "mse", experimental_run_tf_function=False)
    with pytest.raises(TypeError, match="unexpected"):
        model.compile("sgd", "mse", other=False)
    inner = keras.optimizers.Adam(0.1)
    for optimizer in (inner, keras.optimizers.LossScaleOptimizer(inner)):
        optimizer.build(model.trainable_variables)
        assert optimizer.variables() == list(optimizer.variables) and len(optimizer.variables) >= 6
    assert type(keras.models.clone_model(model)) is type(model)
    model.train_on_batch(np.ones((2, 1)), np.ones((2, 1)))
