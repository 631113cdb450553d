"""Keras, with gradients that travel in few bytes: training is what the formulas say, in one process with NumPy and Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import hvdlite_tf as hvd
from hvdlite.api import world
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from hvdlite.testing import on_ranks
from tests.conftest import UNDER_MPI
from tests.support import lossy_reference

if not UNDER_MPI:
    # As in test_keras_training.py: ranks that are threads share TensorFlow's pool.
    tf.config.threading.set_inter_op_parallelism_threads(8)

pytestmark = pytest.mark.filterwarnings("ignore:.*shuffle=True", "ignore:.*ran out of data")

Ranks = Callable[..., list[Any]]
SHAPES = [(10, 16), (16,), (16, 2), (2,)]
_rng = np.random.default_rng(5)
WEIGHTS = [_rng.standard_normal(shape) * 0.3 for shape in SHAPES]
RATE, MOMENTUM, ROWS, STEPS = 0.125, 0.5, 6, 5
KINDS: dict[str, tuple[Callable[[], Any], Callable[[], lossy_reference.Combine]]] = {
    "powersgd": (lambda: hvd.Compression.powersgd(rank=1), lambda: lossy_reference.powersgd(1)),
    "topk": (lambda: hvd.Compression.topk(0.2, smallest=20), lambda: lossy_reference.topk(0.2, 20)),
}
both = pytest.mark.parametrize("kind", list(KINDS))


def make_model(dtype: str) -> Any:
    layers = [keras.layers.Dense(16, activation="tanh", dtype=dtype), keras.layers.Dense(2, dtype=dtype)]
    model = keras.Sequential([keras.layers.Input((10,), dtype=dtype), *layers])
    model.set_weights(WEIGHTS)
    return model


def batch(step: int, rank: int, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng([step, rank]).standard_normal((ROWS, 10))
    return x.astype(dtype), np.sin(x[:, :2]).astype(dtype)


def gradients_of(model: Any, x: Any, y: Any, scale: Any = 1.0) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2) * tf.cast(scale, y.dtype)
    found: list[Any] = tape.gradient(loss, model.trainable_variables)
    return found


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(RATE, momentum=MOMENTUM, **options)


def flat(weights: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.reshape(weight, -1) for weight in weights])


def in_one_process(
    kind: str,
    samples: Sequence[Sequence[float]],
    dtype: str = "float64",
    passes: int = 1,
    data: Callable[[int, int, str], tuple[np.ndarray, np.ndarray]] = batch,
) -> np.ndarray:
    """Return the weights after a step for each of `samples`, the weights of all ranks; none of a rank without data."""
    model, combine = make_model(dtype), KINDS[kind][1]()
    velocities = [np.zeros(shape) for shape in SHAPES]
    for step, weights in enumerate(samples):
        everybody = []
        for rank in range(len(weights)):
            parts = [gradients_of(model, *data(passes * step + part, rank, dtype)) for part in range(passes)]
            everybody.append([np.mean([g.numpy() for g in each], 0) for each in zip(*parts, strict=True)])
        mean = combine(everybody, weights)
        velocities = [MOMENTUM * v - RATE * gradient for v, gradient in zip(velocities, mean, strict=True)]
        model.set_weights([w + v for w, v in zip(model.get_weights(), velocities, strict=True)])
    return flat(model.get_weights())


def trainer(model: Any, optimizer: Any, graph: bool) -> Callable[[Any, Any], None]:
    def step(x: Any, y: Any) -> None:
        optimizer.apply_gradients(zip(gradients_of(model, x, y), model.trainable_variables, strict=True))

    return tf.function(step, reduce_retracing=True) if graph else step


@pytest.mark.parametrize(("kind", "graph"), [("powersgd", True), ("topk", False)], ids=["function", "eager"])
def test_a_loop_is_what_the_formula_says(ranks: Ranks, kind: str, graph: bool) -> None:
    def check() -> None:
        samples = [2.0 + rank for rank in range(hvd.size())]
        model = make_model("float64")
        optimizer = hvd.DistributedOptimizer(sgd(), compression=KINDS[kind][0]())
        optimizer.set_batch_weight(samples[hvd.rank()])
        step = trainer(model, optimizer, graph)
        for number in range(STEPS):
            step(*map(tf.constant, batch(number, hvd.rank())))
        expected = in_one_process(kind, [samples] * STEPS)
        np.testing.assert_allclose(flat(model.get_weights()), expected, atol=1e-12)
        everybody = hvd.allgather_object([weight.tobytes() for weight in model.get_weights()])
        assert all(each == everybody[0] for each in everybody)

    ranks(check)


@both
@pytest.mark.ranks(at_least=2)
def test_fit_with_uneven_data(ranks: Ranks, kind: str) -> None:
    """Rank 0 has no data: it has joined before the others have memory for gradients. Two epochs."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        counts = [2 * r for r in range(size)]
        samples = [[float(step < count) for count in counts] for step in range(max(counts))]
        model = make_model("float32")
        model.compile(hvd.DistributedOptimizer(sgd(), compression=KINDS[kind][0]()), loss="mse")
        rows = [batch(step, rank, "float32") for step in range(counts[rank])]
        x, y = (
            np.concatenate([*each, np.zeros((0, columns), "float32")])
            for each, columns in zip(zip(*rows, strict=True) if rows else ([], []), (10, 2), strict=True)
        )
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS)
        model.fit(data, epochs=2, verbose=0, callbacks=[hvd.callbacks.Distributed()])
        expected = in_one_process(
            kind, 2 * samples, "float32", data=lambda step, r, dtype: batch(step % max(counts), r, dtype)
        )
        np.testing.assert_allclose(flat(model.get_weights()), expected, atol=1e-6)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_accumulated_gradients(ranks: Ranks) -> None:
    def check() -> None:
        kind = "powersgd"
        model = make_model("float64")
        optimizer = hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=2), compression=KINDS[kind][0]())
        step = trainer(model, optimizer, graph=True)
        for number in range(6):
            step(*map(tf.constant, batch(number, hvd.rank())))
        expected = in_one_process(kind, [[1.0] * hvd.size()] * 3, passes=2)
        np.testing.assert_allclose(flat(model.get_weights()), expected, atol=1e-12)

    ranks(check)


@both
@pytest.mark.ranks(at_least=2)
def test_scaled_losses(ranks: Ranks, kind: str) -> None:
    """The scale changes, and two steps overflow on one rank: the memory is one of gradients, not of scaled ones."""

    def check() -> None:
        model = make_model("float32")
        inside = kind == "powersgd"  # if not, Keras puts the scale around the distributed optimizer, as `compile` does
        plain = sgd() if inside else hvd.DistributedOptimizer(sgd(), compression=KINDS[kind][0]())
        optimizer = keras.optimizers.LossScaleOptimizer(plain, initial_scale=2.0**10, dynamic_growth_steps=2)
        if inside:
            optimizer = hvd.DistributedOptimizer(optimizer, compression=KINDS[kind][0]())
        good = [step for step in range(7) if step not in (1, 4)]

        @tf.function(reduce_retracing=True)
        def step(x: Any, y: Any, factor: Any) -> None:
            gradients = gradients_of(model, x, y, optimizer.scale_loss(factor))
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for number in range(7):
            overflows = number not in good and hvd.rank() == hvd.size() - 1
            step(*map(tf.constant, batch(number, hvd.rank(), "float32")), tf.constant(np.inf if overflows else 1.0))
        assert optimizer.dynamic_scale.numpy() == 2.0**10  # it was halved and doubled twice
        expected = in_one_process(
            kind, [[1.0] * hvd.size()] * len(good), "float32", data=lambda step, r, dtype: batch(good[step], r, dtype)
        )
        np.testing.assert_allclose(flat(model.get_weights()), expected, atol=1e-6)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_tapes_share_one_memory(ranks: Ranks) -> None:
    """A tape is new in each step, and its compression is not."""

    def check() -> None:
        kind = "topk"
        model, plain, compression = make_model("float64"), sgd(), KINDS[kind][0]()
        for number in range(STEPS):
            x, y = map(tf.constant, batch(number, hvd.rank()))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            tape = hvd.DistributedGradientTape(tape, compression=compression)
            gradients = tape.gradient(loss, model.trainable_variables)
            plain.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        expected = in_one_process(kind, [[1.0] * hvd.size()] * STEPS)
        np.testing.assert_allclose(flat(model.get_weights()), expected, atol=1e-12)
        other = tf.Variable(1.0)
        with tf.GradientTape() as tape:
            loss = other**2
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        with pytest.raises(ArgumentError, match=r"remembers something of each variable.*another variable than the 4"):
            tape.gradient(loss, [other])

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_optimizers_of_tf_keras(ranks: Ranks) -> None:
    def check() -> None:
        kind = "powersgd"
        model, plain = make_model("float64"), tf_keras.optimizers.SGD(RATE, momentum=MOMENTUM)
        optimizer = hvd.DistributedOptimizer(plain, compression=KINDS[kind][0]())
        variables = [weight.value for weight in model.trainable_variables]
        for number in range(STEPS):
            gradients = gradients_of(model, *map(tf.constant, batch(number, hvd.rank())))
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        expected = in_one_process(kind, [[1.0] * hvd.size()] * STEPS)
        np.testing.assert_allclose(flat(model.get_weights()), expected, atol=1e-12)

    ranks(check)


@both
def test_training_goes_on_from_a_state(ranks: Ranks, kind: str) -> None:
    def check() -> None:
        def train(weights: Any, state: Any, steps: range) -> tuple[list[np.ndarray], Any]:
            model, compression = make_model("float64"), KINDS[kind][0]()
            model.set_weights(weights)
            if state is not None:
                compression.load_state_dict(state)
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE), compression=compression)
            step = trainer(model, optimizer, graph=False)
            for number in steps:
                step(*map(tf.constant, batch(number, hvd.rank())))
            return model.get_weights(), compression.state_dict()

        whole, _ = train(WEIGHTS, None, range(4))
        weights, state = train(WEIGHTS, None, range(2))
        again, _ = train(weights, state, range(2, 4))
        assert all(np.array_equal(one, other) for one, other in zip(whole, again, strict=True))

    ranks(check)


class Counts:
    """The sum of the gradients, and how often and with which parameters it is called."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[int, tuple[int, ...]]]] = []

    def aggregate(self, bucket: Any, weights: Any, collectives: Any) -> None:
        self.seen.append([(number, view.shape) for number, view in sorted(bucket.tensors.items())])
        for array in bucket.arrays:
            collectives.allreduce(array, hvd.Sum)


def test_an_aggregator_of_the_program(ranks: Ranks) -> None:
    """It is called on one rank too, and in host memory sees each variable by its place; rows of a table travel beside it."""

    def check() -> None:
        table, weight = tf.Variable(tf.zeros((5, 2))), tf.Variable(tf.zeros((3,)))
        aggregator = Counts()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), aggregator=aggregator)
        rows = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([hvd.rank()]), tf.constant([5, 2]))
        for _ in range(2):
            optimizer.apply([rows, tf.fill((3,), 1.0 + hvd.rank())], [table, weight])
        assert aggregator.seen == [[(1, (3,))]] * 2
        np.testing.assert_allclose(weight, -2.0 * np.sum(1.0 + np.arange(hvd.size())) * np.ones(3))
        np.testing.assert_allclose(table[: hvd.size()], np.full((hvd.size(), 2), -2.0 / hvd.size()), rtol=1e-6)

    ranks(check)


def test_what_does_not_go_together(ranks: Ranks) -> None:
    def check() -> None:
        def wrap(**options: Any) -> Any:
            return hvd.DistributedOptimizer(sgd(), **options)

        small = hvd.Compression.topk(0.1)
        for options, message in (
            ({"compression": small, "op": hvd.Sum}, r"op=.* and aggregator=topk.* do not go together"),
            ({"compression": small, "aggregator": Counts()}, "both combine gradients: give one of them"),
            (
                {"compression": hvd.Compression.fp16, "aggregator": small},
                "compression='FP16Compressor' and aggregator=topk",
            ),
            ({"compression": hvd.Compression.topk}, "TopK is a class: make one for this optimizer"),
            ({"aggregator": 7}, "aggregator=7: expected an object with a method aggregate"),
        ):
            with pytest.raises(ArgumentError, match=message):
                wrap(**options)
        if hvd.size() > 1:
            with pytest.raises(MismatchError, match=r"(?s)rank 0: aggregator=powersgd\(rank=1.*powersgd\(rank=2"):
                wrap(compression=hvd.Compression.powersgd(1 + min(1, hvd.rank())))
        wrap(compression=small).apply([tf.ones(2)], [tf.Variable(tf.ones(2))])
        with pytest.raises(ArgumentError, match="make one for each optimizer"):
            wrap(compression=small).apply([tf.ones(2)], [tf.Variable(tf.ones(2))])
        plain = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        distributed = hvd.DistributedOptimizer(plain, compression=hvd.Compression.topk(0.1))
        with tf.Graph().as_default():
            loss = tf.reduce_sum(tf.compat.v1.Variable(tf.ones(2)))
            with pytest.raises(ArgumentError, match="this is a graph for a session"):
                distributed.minimize(loss)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_an_aggregator_that_comes_after_a_rank_has_joined(ranks: Ranks) -> None:
    def check() -> None:
        if hvd.rank() == 0:
            hvd.join()
        else:
            with pytest.raises(HvdliteError, match=r"rank 0 called join\(\) before the other ranks have used"):
                hvd.DistributedOptimizer(sgd(), compression=hvd.Compression.topk(0.1))
            hvd.join()

    ranks(check)


def test_bytes_that_travel() -> None:
    """Of ranks that share no memory, in 8 steps after the first: gradients of four matrices of 64 × 64, and a vector of 64."""
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "gradients": dict,
        "powersgd": lambda: {"compression": hvd.Compression.powersgd(rank=1)},
        "topk": lambda: {"compression": hvd.Compression.topk(0.01)},
        "LocalSGD": lambda: {"local_steps": hvd.LocalSGD(every=8)},
        "DiLoCo": lambda: {"local_steps": hvd.DiLoCo(every=8), "compression": hvd.Compression.fp16},
    }

    def check(make: Callable[[], dict[str, Any]]) -> int:
        variables = [tf.Variable(tf.zeros(shape)) for shape in [(64, 64)] * 4 + [(64,)]]
        gradients = [tf.ones(variable.shape) for variable in variables]
        optimizer = hvd.DistributedOptimizer(sgd(), **make())
        optimizer.apply(gradients, variables)
        fabric: Any = world()._transport.fabric  # type: ignore[attr-defined]
        before = fabric.traffic(hvd.rank()).bytes
        for _ in range(8):
            optimizer.apply(gradients, variables)
        return int(fabric.traffic(hvd.rank()).bytes - before)

    sent = {
        name: on_ranks(2, check, make, config=Config(shared_memory=False, advice=False))[1]
        for name, make in ways.items()
    }
    whole, rows, vector = 4 * 64 * 64 * 4, 4 * 64 * 4, 64 * 4
    header = sent["gradients"] / 8 - whole - vector
    assert 0 < header < 500
    assert sent["powersgd"] == pytest.approx(8 * (2 * rows + vector + header), rel=0.05)
    assert sent["topk"] == pytest.approx(
        8 * (4 * 41 * 8 + vector + header), rel=0.05
    )  # places of 4 bytes and values of 4
    assert sent["LocalSGD"] == pytest.approx(whole + vector, rel=0.05)
    assert sent["DiLoCo"] == pytest.approx((whole + vector) / 2, rel=0.05)
