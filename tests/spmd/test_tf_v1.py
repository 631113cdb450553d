"""Graphs and sessions of TensorFlow 1, and the optimizers of tf_keras: equal to one process on the joined batch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.errors import ArgumentError
from hvdlite.testing import on_ranks
from hvdlite_tf import horovod
from tests.conftest import UNDER_MPI

tf_keras = pytest.importorskip("tf_keras")
v1 = tf.compat.v1

if not UNDER_MPI:
    # Ranks that are threads share TensorFlow's pool: it needs a thread for each rank that waits for the others.
    tf.config.threading.set_inter_op_parallelism_threads(8)

STEPS, ROWS = 20, 12
_rng = np.random.default_rng(11)
X = _rng.standard_normal((STEPS, ROWS, 5)).astype("float32")
TOKENS = _rng.integers(0, 6, (STEPS, ROWS))
Y = _rng.standard_normal((STEPS, ROWS, 2)).astype("float32")
WEIGHTS = [_rng.standard_normal(shape).astype("float32") * 0.5 for shape in [(5, 8), (6, 8), (8, 2)]]


def loss_of(variables: Any, x: Any, tokens: Any, y: Any, dense: bool = False) -> Any:
    """Of a small network with an embedding, whose gradient is sparse or dense."""
    first, table, second = variables
    rows = tf.one_hot(tokens, 6) @ table if dense else tf.gather(table, tokens)
    return tf.reduce_mean(tf.square(tf.tanh(x @ first + rows) @ second - y))


def shares(rank: int, size: int) -> list[tuple[np.ndarray, ...]]:
    """This rank's equal share of each batch."""
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    return [tuple(each[step, rows] for each in (X, TOKENS, Y)) for step in range(STEPS)]


def joined(passes: int) -> list[tuple[np.ndarray, ...]]:
    """The batches of `passes` steps as one."""
    return [
        tuple(np.concatenate(each[step : step + passes]) for each in (X, TOKENS, Y))
        for step in range(0, STEPS - passes + 1, passes)
    ]


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
    assert all(np.array_equal(got, other) for other in hvd.allgather_object(got))


# ---- TensorFlow 1 ----


def train_in_session(
    batches: list[tuple[np.ndarray, ...]], wrap: Callable[[Any], Any], rank: int = 0, resources: bool = True
) -> tuple[np.ndarray, int]:
    """All weights, flat, and the global step. A rank begins with weights of its own, until they are broadcast."""
    with tf.Graph().as_default():
        inputs = [v1.placeholder(each.dtype, each.shape) for each in batches[0]]
        variables = [
            # Both kinds of variables that TensorFlow 1 has.
            v1.get_variable(f"v{i}", initializer=weight + rank, use_resource=resources or i == 1)
            for i, weight in enumerate(WEIGHTS)
        ]
        optimizer = wrap(v1.train.MomentumOptimizer(0.1, 0.9))
        step = v1.train.get_or_create_global_step()
        train = optimizer.minimize(loss_of(variables, *inputs), global_step=step)
        hooks = [] if optimizer.__class__ is v1.train.MomentumOptimizer else [hvd.BroadcastGlobalVariablesHook(0)]
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            for batch in batches:
                session.run(train, dict(zip(inputs, batch, strict=True)))
            weights = session.run(variables)
            assert optimizer.get_slot_names() == ["momentum"]
            assert optimizer.get_slot(variables[0], "momentum").shape == variables[0].shape
            assert len(optimizer.variables()) == 3
            return np.concatenate([weight.ravel() for weight in weights]), int(session.run(step))


@functools.cache
def trained_in_session(passes: int) -> np.ndarray:
    return train_in_session(joined(passes), lambda optimizer: optimizer)[0]


@pytest.mark.costly
@pytest.mark.ranks(at_most=3)
@pytest.mark.parametrize("passes", [1, 3])
def test_a_session(ranks: Any, passes: int) -> None:
    expected = trained_in_session(passes)
    options: dict[str, Any] = {}
    if passes > 1:
        options = {"backward_passes_per_step": passes, "average_aggregated_gradients": True, "sparse_as_dense": True}

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        batches = shares(rank, size)
        # A branch can write to resources only (unless TensorFlow 2's behaviour is switched off).
        wrap = functools.partial(hvd.DistributedOptimizer, **options)
        weights, steps = train_in_session(batches, wrap, rank, resources=passes > 1)
        assert_close(weights, expected)
        assert steps == STEPS

    ranks(check)


@pytest.mark.ranks(2)
def test_a_join_in_a_session_says_how_all_ranks_get_the_variables(ranks: Any) -> None:
    roots = []

    def check() -> None:
        rank = hvd.rank()
        with tf.Graph().as_default(), v1.Session() as session:
            variable = v1.get_variable("variable", initializer=0.0, use_resource=True)
            train = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0)).minimize(variable * 2)
            joined, shared = hvd.join(), hvd.broadcast_global_variables(0)
            session.run(v1.global_variables_initializer())
            for _ in range(3 - 2 * rank):
                session.run(train)
            assert session.run(joined) == 0
            assert session.run(variable) == -6 + 4 * rank
            session.run(shared)
            assert session.run(variable) == -6
        roots.append(rank)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ranks(check)
    told = [each for each in said if "which join() returns, by session.run(hvd.broadcast_global" in str(each.message)]
    assert len(told) == roots.count(0)


def test_broadcast_global_variables(ranks: Any) -> None:
    def check() -> None:
        root = hvd.size() - 1
        with tf.Graph().as_default(), v1.Session() as session:
            variables = [v1.get_variable(name, initializer=[float(hvd.rank())] * 3) for name in "ab"]
            operation = hvd.broadcast_global_variables(root)
            session.run(v1.global_variables_initializer())
            session.run(operation)
            assert all((value == root).all() for value in session.run(variables))
        with pytest.raises(ArgumentError, match="hvd.broadcast_variables"):
            hvd.broadcast_global_variables(0)

    ranks(check)


def test_eager_code_and_local_variables(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        for passes in (1, 2):
            shared, local = tf.Variable(1.0), tf.Variable(1.0)
            plain = v1.train.GradientDescentOptimizer(1.0)
            optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=passes)
            assert optimizer is plain and isinstance(optimizer, v1.train.GradientDescentOptimizer)
            optimizer.register_local_var(local)
            for _ in range(passes):
                optimizer.minimize(
                    lambda shared=shared, local=local: shared * float(rank) + local * (rank + 1.0),
                    var_list=[shared, local],
                )
            assert np.allclose(shared.numpy(), 1 - passes * (size - 1) / 2)
            assert np.allclose(local.numpy(), 1 - passes * (rank + 1) / size)
        with pytest.raises(ArgumentError, match="distributed already"):
            hvd.DistributedOptimizer(optimizer)
        with pytest.raises(ArgumentError, match="backward_passes_per_step=0"):
            hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=0)

    ranks(check)


# ---- tf_keras ----

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "new": lambda: tf_keras.optimizers.Adam(1e-2, global_clipnorm=0.05, jit_compile=False),
    "legacy": lambda: tf_keras.optimizers.legacy.Adam(1e-2, global_clipnorm=0.05),
}


def train_tf_keras(
    kind: str, graph: bool, passes: int, batches: list[tuple[np.ndarray, ...]], wrap: Callable[[Any], Any]
) -> tuple[np.ndarray, int]:
    """All weights, flat, and the optimizer's count of iterations."""
    variables = [tf.Variable(weight) for weight in WEIGHTS]
    optimizer = wrap(OPTIMIZERS[kind]())

    def step(*batch: Any) -> None:
        with tf.GradientTape() as tape:
            # Rows that are looked up twice are clipped apart, unless they are added up over several passes.
            loss = loss_of(variables, *batch, dense=passes > 1)
        optimizer.minimize(loss, variables, tape=tape)

    run = tf.function(step) if graph else step
    for batch in batches:
        run(*map(tf.constant, batch))
    return np.concatenate([variable.numpy().ravel() for variable in variables]), int(optimizer.iterations.numpy())


@functools.cache
def trained_with_tf_keras(kind: str, passes: int) -> np.ndarray:
    return train_tf_keras(kind, True, passes, joined(passes), lambda optimizer: optimizer)[0]


@pytest.mark.costly
@pytest.mark.ranks(at_most=3)
@pytest.mark.parametrize(
    ("kind", "graph", "passes"), [("new", True, 1), ("new", False, 2), ("legacy", False, 1), ("legacy", True, 2)]
)
def test_optimizers_of_tf_keras(ranks: Any, kind: str, graph: bool, passes: int) -> None:
    expected = trained_with_tf_keras(kind, passes)
    options = {} if passes == 1 else {"backward_passes_per_step": passes, "average_aggregated_gradients": True}

    def check() -> None:
        wrap = functools.partial(hvd.DistributedOptimizer, **options)
        weights, iterations = train_tf_keras(kind, graph, passes, shares(hvd.rank(), hvd.size()), wrap)
        assert_close(weights, expected)
        assert iterations == STEPS // passes

    ranks(check)


@pytest.mark.skipif(UNDER_MPI, reason="`fit` takes seconds to begin; done once, on threads")
def test_fit_of_tf_keras() -> None:
    def train(rank: int, size: int, wrap: Callable[[Any], Any]) -> Any:
        layers = tf_keras.layers
        model = tf_keras.Sequential([layers.Input((5,)), layers.Dense(8, "tanh"), layers.Dense(2)])
        model.set_weights(
            [np.full(w.shape, 0.1, "float32") * (1 + np.arange(w.shape[-1])) for w in model.get_weights()]
        )
        model.compile(wrap(tf_keras.optimizers.SGD(0.1, momentum=0.9, jit_compile=False)), "mse")
        x, _, y = (np.concatenate(each) for each in zip(*shares(rank, size), strict=True))
        model.fit(x, y, batch_size=ROWS // size, shuffle=False, verbose=0)
        return model

    expected = np.concatenate([weight.ravel() for weight in train(0, 1, lambda optimizer: optimizer).get_weights()])

    def check() -> None:
        model = train(hvd.rank(), hvd.size(), hvd.DistributedOptimizer)
        assert_close(np.concatenate([weight.ravel() for weight in model.get_weights()]), expected)

    on_ranks(2, check)


@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_it_stays_an_optimizer_of_tf_keras(ranks: Any, kind: str) -> None:
    def check() -> None:
        plain = OPTIMIZERS[kind]()
        config = plain.get_config()
        optimizer = hvd.DistributedOptimizer(plain)
        assert optimizer is plain and isinstance(optimizer, type(OPTIMIZERS[kind]()))
        assert optimizer.get_config() == config
        twin = type(optimizer).from_config(config)
        assert type(twin) is type(OPTIMIZERS[kind]()) and twin.get_config() == config
        optimizer.learning_rate = 0.25
        assert float(optimizer.learning_rate) == 0.25
        with pytest.raises(ArgumentError, match="distributed already"):
            hvd.DistributedOptimizer(optimizer)

        rank, size = hvd.rank(), hvd.size()
        shared, local = tf.Variable([1.0]), tf.Variable([1.0])
        sgd = (tf_keras.optimizers if kind == "new" else tf_keras.optimizers.legacy).SGD(1.0)
        optimizer = hvd.DistributedOptimizer(sgd, op=hvd.Sum)
        optimizer.register_local_var(local)
        optimizer.apply_gradients([(tf.constant([rank + 0.0]), shared), (tf.constant([1.0]), local)])
        assert np.allclose([shared.numpy(), local.numpy()], [[1 - size * (size - 1) / 2], [1 - 1 / size]])
        # Told that they have been combined: this rank's, as they are.
        optimizer.apply_gradients([(tf.constant([1.0]), shared)], experimental_aggregate_gradients=False)
        assert np.allclose(shared.numpy(), -size * (size - 1) / 2)

    ranks(check)


@pytest.mark.parametrize("kind", ["new", "legacy"])
@pytest.mark.parametrize("outside", [True, False])
def test_loss_scale(ranks: Any, kind: str, outside: bool) -> None:
    """All ranks skip a step whose gradients overflow on one of them."""

    def check() -> None:
        variable = tf.Variable([1.0])
        sgd = (tf_keras.optimizers if kind == "new" else tf_keras.optimizers.legacy).SGD(1.0)
        scale = functools.partial(tf_keras.mixed_precision.LossScaleOptimizer, initial_scale=4.0)
        optimizer = scale(hvd.DistributedOptimizer(sgd)) if outside else hvd.DistributedOptimizer(scale(sgd))
        last = hvd.rank() == hvd.size() - 1
        for gradient, value, size in ((np.inf if last else 1.0, 1.0, 2.0), (2.0 * hvd.rank(), 2.0 - hvd.size(), 2.0)):
            optimizer.get_scaled_loss(tf.constant(1.0))
            optimizer.get_unscaled_gradients([tf.constant([1.0])])
            optimizer.apply_gradients([(tf.constant([gradient]), variable)])
            assert np.allclose(variable.numpy(), value)
            assert float(optimizer.loss_scale) == size

    ranks(check)


# ---- habits of Horovod's, for programs under hvdlite.compat ----


@pytest.mark.parametrize("kind", ["new", "legacy"])
def test_several_passes_as_horovod_counts_them(ranks: Any, kind: str) -> None:
    """`compute_gradients` combines, `apply_gradients` does not do it again, and `iterations` counts every pass."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        sgd = (tf_keras.optimizers if kind == "new" else tf_keras.optimizers.legacy).SGD(1.0)
        optimizer = horovod.DistributedOptimizer(sgd, backward_passes_per_step=2, sparse_as_dense=True, op=hvd.Sum)
        compute = optimizer.compute_gradients if kind == "new" else optimizer._compute_gradients
        x, y = tf.Variable([0.0]), tf.Variable([1.0, 2.0])

        @tf.function
        def step() -> None:
            pairs = compute(lambda: x * float(rank) - tf.gather(y, [0]), [x, y])
            optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)

        for passes in range(1, 6):
            step()
            assert optimizer.iterations.numpy() == passes
            applied = passes // 2 * 2
            assert np.allclose(x.numpy(), -applied * size * (size - 1) / 2)
            assert np.allclose(y.numpy(), [1 + applied * size, 2])
        assert optimizer._agg_helper.counter.numpy() == 1
        # Gradients from elsewhere are combined when they are applied.
        optimizer.apply_gradients([(tf.constant([float(rank)]), x), (tf.zeros(2), y)])
        assert np.allclose(x.numpy(), -6 * size * (size - 1) / 2)

    ranks(check)


def test_keras_3_as_it_was(ranks: Any) -> None:
    def check() -> None:
        plain = keras.optimizers.SGD(0.5)
        optimizer = horovod.DistributedOptimizer(plain)
        variable = keras.Variable([1.0])
        optimizer.build([variable])
        assert optimizer is plain and optimizer.__class__ is keras.optimizers.SGD
        assert optimizer.variables() == list(optimizer.variables)
        optimizer.lr = 0.25
        assert float(optimizer.lr) == float(optimizer.learning_rate) == 0.25
        optimizer.apply([tf.constant([2.0 * hvd.rank()])], [variable])
        assert np.allclose(variable.numpy(), 1 - 0.25 * (hvd.size() - 1))
        assert type(optimizer.from_config(optimizer.get_config())) is keras.optimizers.SGD

    ranks(check)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_some_ranks_do_not_have(ranks: Any, graph: bool, passes: int) -> None:
    """They count as zero there, and the variables stay alike."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        first_only, all_of_them, nobodys = variables = [tf.Variable([1.0]) for _ in range(3)]
        optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0), backward_passes_per_step=passes)

        def step() -> None:
            gradients = [tf.ones(1) if rank == 0 else None, tf.ones(1), None]
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        run = tf.function(step) if graph else step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tf_keras says that a variable has no gradient
            for _ in range(2 * passes):
                run()
        assert np.allclose(first_only.numpy(), 1 - 2 * passes / size)
        assert np.allclose(all_of_them.numpy(), 1 - 2 * passes)
        assert nobodys.numpy() == 1

    ranks(check)
