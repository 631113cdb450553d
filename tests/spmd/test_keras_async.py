"""A parameter server for Keras: what each mode computes, what arrives, what is saved, and what is refused."""

from __future__ import annotations

import copy
import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.errors import (
    ArgumentError,
    CommunicationError,
    DistributedAlreadyError,
    MismatchError,
)
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # Ranks that are threads share TensorFlow's pool: it needs a thread for each rank that waits for the others.
    tf.config.threading.set_inter_op_parallelism_threads(8)

MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "ssp": {"mode": "ssp", "staleness": 1},
    "async": {"mode": "async"},
}
BATCHES, ROWS, EPOCHS = 3, 12, 2
_rng = np.random.default_rng(3)
X = _rng.standard_normal((BATCHES, ROWS, 5))
Y = _rng.standard_normal((BATCHES, ROWS, 2))
WEIGHTS = [_rng.standard_normal(shape) * 0.3 for shape in [(5, 8), (8,), (8, 2), (2,)]]
TOLERANCE = 1e-12  # in float64

schedules = keras.optimizers.schedules
FITTED: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipvalue=0.05),
    "AdamW": lambda: keras.optimizers.AdamW(
        schedules.ExponentialDecay(0.02, 2, 0.8),
        weight_decay=0.1,
        clipnorm=0.05,
        use_ema=True,
        ema_overwrite_frequency=2,
    ),
}
LOOPED: dict[str, Callable[[], Any]] = {
    "Adam": lambda: keras.optimizers.Adam(0.02, weight_decay=0.3),
    "Nadam": lambda: keras.optimizers.Nadam(0.02, weight_decay=0.3),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.02, weight_decay=0.3),
}


def make_model(scale: float = 1.0) -> Any:
    """A model of float64; its last kernel stays within a norm."""
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((5,), dtype="float64"),
            layers.Dense(8, activation="tanh", dtype="float64"),
            layers.Dense(2, dtype="float64", kernel_constraint=keras.constraints.MaxNorm(0.8)),
        ]
    )
    model.set_weights([scale * weights for weights in WEIGHTS])
    return model


def flat(model: Any) -> np.ndarray:
    return np.concatenate([weights.reshape(-1) for weights in model.get_weights()])


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max())


def share(rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    return X[:, rows].reshape(-1, 5), Y[:, rows].reshape(-1, 2)


def fit(model: Any, optimizer: Any, rank: int, size: int, **options: Any) -> None:
    model.compile(optimizer, loss=keras.losses.MeanSquaredError(dtype="float64"), **options)
    model.fit(*share(rank, size), batch_size=ROWS // size, epochs=EPOCHS, shuffle=False, verbose=0)


@functools.cache
def alone(name: str) -> np.ndarray:
    """Two calls of fit in one process: Keras puts the averages in place of the weights after each."""
    model, optimizer = make_model(), FITTED[name]()
    fit(model, optimizer, 0, 1)
    fit(model, optimizer, 0, 1)
    return flat(model)


def everywhere(value: Any) -> list[Any]:
    return hvd.allgather_object(value)


@pytest.mark.costly
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("name", FITTED)
def test_sync_in_fit_is_the_joined_batch(ranks: Any, name: str) -> None:
    expected = alone(name)

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        model = make_model(1.0 + rank)
        optimizer = hvd.AsyncDistributedOptimizer(FITTED[name](), model, mode="sync")
        fit(model, optimizer, rank, size, steps_per_execution=2)
        fit(model, optimizer, rank, size)
        assert distance(flat(model), expected) < TOLERANCE
        assert optimizer.iterations == 2 * EPOCHS * BATCHES
        optimizer.finish()

    ranks(check)


@pytest.mark.costly
@pytest.mark.parametrize(("name", "compiled"), [("Adam", True), *((name, False) for name in LOOPED)])
def test_sync_in_a_loop_with_weights(ranks: Any, name: str, compiled: bool) -> None:
    """The ranks have different numbers of rows, the rate changes, some variables have no gradient in some steps, and the
    constraint and the weight decay are for some variables. The truth is one process with all rows.
    """

    def rows(step: int, rank: int) -> np.ndarray:
        return np.random.default_rng(10 * step + rank).standard_normal((1 + (step + rank) % 3, 5))

    def make() -> tuple[Any, Any]:
        model, optimizer = make_model(), LOOPED[name]()
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        optimizer.build(model.trainable_variables)
        return model, optimizer

    def step(model: Any, optimizer: Any, x: tf.Tensor, without: int) -> None:
        variables = [v for number, v in enumerate(model.trainable_variables) if number != without]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def train(model: Any, optimizer: Any, batch: Callable[[int], np.ndarray], weighted: bool) -> None:
        function = functools.partial(step, model, optimizer)
        if compiled:
            function = tf.function(function, autograph=False, reduce_retracing=True)
        for number in range(6):
            optimizer.learning_rate = 0.02 / (1 + number)
            x = batch(number)
            if weighted:
                optimizer.set_batch_weight(len(x))
            function(tf.constant(x), 2 * (number % 2))

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        one, plain = make()
        train(one, plain, lambda number: np.concatenate([rows(number, r) for r in range(size)]), False)
        model, optimizer = make()
        optimizer = hvd.AsyncDistributedOptimizer(optimizer, model, mode="sync")
        train(model, optimizer, lambda number: rows(number, rank), True)
        optimizer.finish()
        assert distance(flat(model), flat(one)) < TOLERANCE
        for got, expected in zip(optimizer.variables, plain.variables, strict=True):
            assert distance(got.numpy(), expected.numpy()) < TOLERANCE
        other, distributed = make()
        distributed = hvd.DistributedOptimizer(distributed)
        train(other, distributed, lambda number: rows(number, rank), True)
        assert distance(flat(model), flat(other)) < TOLERANCE

    ranks(check)


@pytest.mark.parametrize("servers", ["sharded", 1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("push_every", [1, 3])
def test_the_servers_change_by_what_was_pushed(ranks: Any, mode: str, servers: Any, push_every: int) -> None:
    """Gradients are whole numbers and SGD has the learning rate 1, so that sums are exact. Each rank makes its own number of
    steps; the last one makes none if it trains.
    """

    def check() -> Any:
        rank, size = hvd.rank(), hvd.size()
        if servers == 1 and size == 1:
            return None
        variables = [
            keras.Variable(np.arange(math.prod(shape), dtype="float32").reshape(shape) + 100 * rank, name=f"v{number}")
            for number, shape in enumerate([(50,), (3, 2), (1,), (0,)])
        ]
        before = [v.numpy() - 100 * rank for v in variables]
        optimizer = hvd.AsyncDistributedOptimizer(
            keras.optimizers.SGD(1.0), variables, servers=servers, push_every=push_every, **MODES[mode]
        )
        assert all(map(np.array_equal, (v.numpy() for v in variables), before))
        assert optimizer.is_server == (servers == 1 and rank == size - 1)
        workers = len(optimizer.workers)
        pushed = [np.zeros_like(each) for each in before]

        @functools.cache
        def function(kind: int) -> Any:
            chosen = [v for number, v in enumerate(variables) if (kind + number) % 2]

            def apply(value: tf.Tensor) -> None:
                optimizer.apply([tf.fill(v.shape, value) for v in chosen], chosen)

            return tf.function(apply, autograph=False)

        if optimizer.is_server:
            optimizer.serve()
        else:
            steps = 12 if mode == "sync" else 0 if rank == workers - 1 > 0 else 4 + 3 * rank
            for step in range(steps):
                value = float(workers * (step + 1 + rank))
                function((step + rank) % 2)(tf.constant(value))
                for number, total in enumerate(pushed):
                    total -= value * ((step + rank + number) % 2)
            optimizer.finish()
            assert optimizer.pushes == math.ceil(steps / push_every)
        optimizer.finish()
        return before, pushed, [v.numpy() for v in variables], workers, int(optimizer.iterations), optimizer.pushes

    results = [each for each in ranks(check) if each is not None]
    for _, _, after, workers, iterations, _ in results:
        for number, (before, value) in enumerate(zip(results[0][0], after, strict=True)):
            total = sum(pushed[number] for _, pushed, *_ in results)
            assert np.array_equal(value, before + total / (workers if mode == "sync" else 1))
        made = [pushes for *_, pushes in results]
        assert iterations == (max(made) if mode == "sync" else sum(made))


def in_turn(optimizer: Any, model: Any, steps: range) -> None:
    """Let rank 0 make steps, and the others none, so that the order of the pushes is known."""
    if hvd.rank() == 0:
        plain_steps(optimizer, model, steps)
    optimizer.synchronize()


def plain_steps(optimizer: Any, model: Any, steps: range) -> None:
    for step in steps:
        optimizer.apply([(step + 1.0) * v for v in model.trainable_variables], model.trainable_variables)


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_each_push_is_a_step_of_the_optimizer(ranks: Any, mode: str) -> None:
    """With a norm over all gradients, and a schedule that goes by the steps of all ranks."""

    def make() -> tuple[Any, Any]:
        rate = schedules.ExponentialDecay(0.02, 2, 0.8)
        return make_model(), keras.optimizers.Adam(rate, global_clipnorm=0.5, loss_scale_factor=8.0)

    def check() -> None:
        model, plain = make()
        plain_steps(plain, model, range(5))
        other, optimizer = make()
        optimizer = hvd.AsyncDistributedOptimizer(optimizer, other, mode=mode, staleness=9 if mode == "ssp" else None)
        in_turn(optimizer, other, range(5))
        assert distance(flat(other), flat(model)) < TOLERANCE
        optimizer.finish()
        assert optimizer.mean_delay == 0

    ranks(check)


@pytest.mark.costly
@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_ranks_with_different_data_end_alike(ranks: Any, mode: str, tmp_path: Path) -> None:
    """After `fit` rank 0 alone saves the model. A plain model that is loaded from it, and one that is wrapped again, go on from
    there as this one does.
    """

    def check() -> None:
        rank = hvd.rank()
        model = make_model(1.0 + rank)
        optimizer = hvd.AsyncDistributedOptimizer(keras.optimizers.Adam(0.01), model, **MODES[mode])
        model.compile(optimizer, loss="mse")
        x, y = X[: 1 + rank % BATCHES].reshape(-1, 5), Y[: 1 + rank % BATCHES].reshape(-1, 2)
        model.fit(x, y, batch_size=4, epochs=1 + rank, shuffle=False, verbose=0)
        # The slots too, and the number of steps of all ranks together.
        told = everywhere([v.numpy().tolist() for v in [*model.weights, *optimizer.variables]])
        assert all(each == told[0] for each in told)
        assert optimizer.iterations == sum(everywhere(optimizer.pushes))
        path = hvd.broadcast_object(str(tmp_path / "model.keras"))
        if rank == 0:
            model.save(path)
        hvd.barrier()
        loaded, again = keras.models.load_model(path), keras.models.load_model(path)
        assert type(loaded.optimizer) is keras.optimizers.Adam
        wrapped = hvd.AsyncDistributedOptimizer(again.optimizer, again, **MODES[mode])
        plain_steps(loaded.optimizer, loaded, range(3))
        in_turn(wrapped, again, range(3))
        in_turn(optimizer, model, range(3))
        assert distance(flat(again), flat(loaded)) < TOLERANCE
        assert distance(flat(model), flat(loaded)) < TOLERANCE
        optimizer.finish()
        wrapped.finish()

    ranks(check)


def test_what_is_saved_and_changed_in_between(ranks: Any, tmp_path: Path) -> None:
    def check() -> None:
        model = make_model()
        optimizer = hvd.AsyncDistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), model)
        model.compile(optimizer, loss="mse")
        plain_steps(optimizer, model, range(1))
        path = str(tmp_path / f"{hvd.rank()}.weights.h5")
        with pytest.raises(ArgumentError, match=r"call optimizer.synchronize\(\) on all ranks before"):
            model.save(str(tmp_path / f"{hvd.rank()}.keras"))
        optimizer.synchronize()
        model.save_weights(path)
        with pytest.raises(ValueError, match="Load the whole model"):  # Keras' own, with our text
            model.load_weights(path)
        model.set_weights([weights * (1 + hvd.rank()) for weights in WEIGHTS])
        for velocity in optimizer.momentums:
            velocity.assign(0 * velocity)
        optimizer.restart()
        in_turn(optimizer, model, range(2))
        other, plain = make_model(), keras.optimizers.SGD(0.1, momentum=0.9)
        plain_steps(plain, other, range(2))
        assert distance(flat(model), flat(other)) < TOLERANCE
        with pytest.raises(ArgumentError, match="cannot be copied"):
            copy.deepcopy(optimizer)
        optimizer.finish()

    ranks(check)


def test_weights_that_a_meeting_replaces(ranks: Any) -> None:
    def check() -> None:
        model = make_model()
        optimizer = hvd.AsyncDistributedOptimizer(keras.optimizers.SGD(0.1), model)
        plain_steps(optimizer, model, range(1))
        model.set_weights(WEIGHTS)
        optimizer.finish()
        assert all(np.array_equal(each, flat(model)) for each in everywhere(flat(model)))
        assert distance(flat(model), flat(make_model())) > 0.01

    with pytest.warns(RuntimeWarning, match=r"rank \d has changed '\S+kernel' since its last step"):
        ranks(check)


@pytest.mark.ranks(at_least=2)
@pytest.mark.slow
def test_servers_that_only_serve(ranks: Any) -> None:
    """Two ranks of which one serves are one rank that trains; its averages come back at the end of `fit`."""
    expected = alone("AdamW")

    def check() -> None:
        model = make_model(1.0 + hvd.rank())
        with hvd.AsyncDistributedOptimizer(FITTED["AdamW"](), model, mode="sync", servers=1) as optimizer:
            if optimizer.is_server:
                with pytest.raises(ArgumentError, match=r"apply\(\): rank \d only serves"):
                    plain_steps(optimizer, model, range(1))
                optimizer.serve()
                return
            with pytest.raises(ArgumentError, match=r"serve\(\): rank \d trains"):
                optimizer.serve()
            fit(model, optimizer, hvd.rank(), hvd.size() - 1)
            fit(model, optimizer, hvd.rank(), hvd.size() - 1)
        assert distance(flat(model), expected) < TOLERANCE

    ranks(check)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compiled", [True, False])
def test_nan_is_refused_before_anything_is_pushed(ranks: Any, mode: str, compiled: bool) -> None:
    def check() -> None:
        model = make_model()
        optimizer = hvd.AsyncDistributedOptimizer(keras.optimizers.SGD(1.0), model, **MODES[mode])
        variables = model.trainable_variables
        before = flat(model)
        apply = tf.function(optimizer.apply, autograph=False) if compiled else optimizer.apply
        for wrong in (math.nan, math.inf, -math.inf):
            gradients = [np.ones(v.shape) for v in variables]
            gradients[3][1] = wrong
            text = rf"rank {hvd.rank()}: the gradient of '\S*bias' has elements that are NaN"
            with pytest.raises(tf.errors.InvalidArgumentError if compiled else ArgumentError, match=text):
                apply([*map(tf.constant, gradients)])
        optimizer.finish()
        assert np.array_equal(flat(model), before)
        assert optimizer.pushes == 0

    ranks(check)


@pytest.mark.parametrize("push_every", [1, 2])
def test_nan_is_passed_on_whole(ranks: Any, push_every: int) -> None:
    """One element of one gradient is infinite, and NaN where infinities of both signs are added; all others count."""

    def check() -> None:
        variables = [tf.Variable(tf.zeros(3)), tf.Variable(tf.zeros(2))]
        plain = keras.optimizers.SGD(1.0)
        with pytest.raises(
            ArgumentError, match=r"expected a model .*got NoneType. Write hvd.AsyncDistributedOptimizer\("
        ):
            hvd.AsyncDistributedOptimizer(plain, mode="sync")
        plain.build(variables)
        optimizer = hvd.AsyncDistributedOptimizer(plain, mode="sync", push_every=push_every, on_nan="pass on")
        for step in range(2):
            infinite = math.inf if (hvd.rank() + step) % 2 else -math.inf
            optimizer.apply([tf.ones(3), tf.constant([1.0, infinite])])
        optimizer.finish()
        np.testing.assert_array_equal(variables[0], [-2.0] * 3)
        np.testing.assert_array_equal(variables[1], [-2.0, math.nan])

    ranks(check)


@pytest.mark.parametrize("mode", MODES)
def test_dtypes_and_variables_of_tensorflow(ranks: Any, mode: str) -> None:
    def check() -> None:
        variables = [tf.Variable(tf.zeros(3, dtype)) for dtype in ("bfloat16", "float16", "float64")]
        optimizer = hvd.AsyncDistributedOptimizer(keras.optimizers.SGD(1.0), variables, **MODES[mode])
        optimizer.apply([tf.range(3, dtype="float32") for _ in "abc"], variables)
        optimizer.finish()
        for v in variables:
            expected = -np.arange(3) * (1 if mode == "sync" else hvd.size())
            assert np.array_equal(v.numpy().astype("float64"), expected)

    ranks(check)


@pytest.mark.parametrize("push_every", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradients(ranks: Any, mode: str, push_every: int) -> None:
    """Rows that come twice are added. In the last steps one rank has a dense gradient. Rows are whole numbers."""
    looked_up = [[[1, 2, 1], [0]], [[3], [2, 2]], [[4, 1], []], [[0, 1], [2]]]

    def check() -> Any:
        embeddings = keras.Variable(np.zeros((5, 3), "float32"), name="embeddings")
        optimizer = hvd.AsyncDistributedOptimizer(
            keras.optimizers.SGD(1.0), [embeddings], push_every=push_every, **MODES[mode]
        )
        apply = tf.function(lambda gradient: optimizer.apply([gradient]), autograph=False)
        total = np.zeros((5, 3))
        for step, given in enumerate(looked_up):
            indices = given[hvd.rank() % 2]
            values = float(hvd.size()) * (1 + np.arange(3 * len(indices), dtype="float32").reshape(-1, 3))
            np.add.at(total, indices, values)
            gradient = tf.IndexedSlices(tf.constant(values), tf.constant(indices, "int32"), tf.constant([5, 3]))
            apply(tf.convert_to_tensor(gradient) if step > 1 and hvd.rank() == 0 else gradient)
        optimizer.finish()
        return embeddings.numpy(), total

    results = ranks(check)
    for embeddings, _ in results:
        pushed = sum(total for _, total in results)
        assert np.array_equal(embeddings, -pushed / (len(results) if mode == "sync" else 1))


@pytest.mark.costly
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("compensation", [hvd.StalenessRate(), hvd.DCASGD(0.5), hvd.DCASGD(2.0, 0.9)], ids=str)
def test_delays_are_compensated(ranks: Any, compensation: Any) -> None:
    """Rank 1 pulls, then rank 0 pushes twice, and then rank 1 pushes a gradient that is two pushes old. The truth is computed
    from the formulas of the papers.
    """

    def check() -> None:
        v = keras.Variable(np.ones(3), dtype="float64", name="v")
        optimizer = hvd.AsyncDistributedOptimizer(keras.optimizers.SGD(0.25), [v], delay_compensation=compensation)
        gradients = [np.array(g) for g in ([1.0, 2.0, -1.0], [0.5, 1.0, 3.0], [2.0, -1.0, 1.0])]
        for number, gradient in enumerate(gradients):
            if hvd.rank() == int(number == 2):
                optimizer.apply([tf.constant(gradient)])
            hvd.barrier()
        optimizer.finish()
        assert optimizer.mean_delay == (2.0 if hvd.rank() == 1 else 0.0)

        now, then, mean_square = np.ones(3), np.ones(3), np.zeros(3)
        for number, g in enumerate(gradients):
            late = number == 2
            if isinstance(compensation, hvd.StalenessRate):
                now = now - 0.25 / (2 if late else 1) * g
                continue
            mean_square = 0.9 * mean_square + 0.1 * g**2
            strength = compensation.strength
            if compensation.mean_square_decay is not None:
                strength = strength / np.sqrt(mean_square + compensation.epsilon)
            now = now - 0.25 * (g + strength * g**2 * (now - then) * late)
        assert distance(v.numpy(), now) < TOLERANCE

    ranks(check)


# What is refused

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "unknown mode": ({"mode": "fast"}, {}, "mode='fast': expected one of"),
    "negative staleness": ({"mode": "ssp", "staleness": -1}, {}, "staleness=-1: .* 0 or more"),
    "only servers": ({"servers": 99}, {}, "servers=99: expected .* ranks only serve"),
    "no NaN": ({"on_nan": "skip"}, {}, "on_nan='skip': expected 'raise' or 'pass on'"),
    "overlap": ({"overlap": True}, {}, "Keras gives an optimizer all gradients of a step at once"),
    "overlapped pull": ({"overlap_pull": True}, {}, "the layers of a graph read their variables without a call"),
    "hogwild": ({"hogwild": True}, {}, "TensorFlow keeps variables in memory of its own"),
    "no delay": ({"mode": "sync", "delay_compensation": hvd.DCASGD()}, {}, "no gradient is old"),
    "accumulating": ({}, {"gradient_accumulation_steps": 2}, "Use push_every"),
    "norm of a mean": ({"mode": "sync"}, {"global_clipnorm": 1.0}, "each server has a part of them"),
    "norm of a sum": ({"push_every": 2}, {"global_clipnorm": 1.0}, "each server has a part of them"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arguments(ranks: Any, what: str) -> None:
    arguments, settings, text = REFUSED[what]

    def check() -> None:
        with pytest.raises(ArgumentError, match=text):
            hvd.AsyncDistributedOptimizer(keras.optimizers.SGD(0.1, **settings), make_model(), **arguments)

    ranks(check)


class Together(keras.optimizers.SGD):
    """Its step depends on the norm over all gradients."""

    def _clip_gradients(self, grads: list[Any]) -> list[Any]:
        clipped: list[Any] = tf.clip_by_global_norm(grads, 0.1)[0]
        return clipped


class Apart(keras.optimizers.SGD):
    """It is like SGD."""


class Nameless(keras.optimizers.SGD):
    """It cannot be made from its configuration."""

    def __init__(self, schedule: Any) -> None:
        super().__init__(0.1)


class Hidden(keras.optimizers.SGD):
    """It keeps slots where nobody knows whose they are."""

    def build(self, variables: list[Any]) -> None:
        super().build(variables)
        self.hidden = {v.name: self.add_variable_from_reference(v, name="hidden") for v in variables}


def test_what_does_not_fit(ranks: Any) -> None:
    def check() -> None:
        model, sgd = make_model(), keras.optimizers.SGD
        for make, text in (
            (lambda: Together(0.1), "Together does not step each variable by itself"),
            (lambda: Hidden(0.1), "keeps variables of its own"),
            (lambda: Nameless(None), r"Nameless.from_config\(config\) fails"),
            (lambda: keras.optimizers.LossScaleOptimizer(sgd(0.1)), "LossScaleOptimizer does not work"),
            (lambda: model, "wraps an optimizer of Keras 3; got"),
            (lambda: sgd, "wraps an optimizer of Keras 3; got keras"),
            (lambda: tf.compat.v1.train.GradientDescentOptimizer(0.1), "wraps an optimizer of Keras 3; got tensorflow"),
        ):
            with pytest.raises(ArgumentError, match=text):
                hvd.AsyncDistributedOptimizer(make(), model)
        for given, text in (
            (keras.Sequential([keras.layers.Dense(2)]), "is not built"),
            (keras.Sequential([keras.layers.Input((2,)), keras.layers.Flatten()]), "something to train"),
            (3, "something to train"),
            ("abc", "something to train"),
        ):
            with pytest.raises(ArgumentError, match=text):
                hvd.AsyncDistributedOptimizer(sgd(0.1), given)
        built = sgd(0.1)
        built.build(make_model().trainable_variables)
        with pytest.raises(ArgumentError, match="was built for other variables"):
            hvd.AsyncDistributedOptimizer(built, model)
        optimizer = hvd.AsyncDistributedOptimizer(Apart(0.1), model)
        for wrap in (lambda each: hvd.AsyncDistributedOptimizer(each, model), hvd.DistributedOptimizer):
            with pytest.raises(DistributedAlreadyError, match="distributed already"):
                wrap(optimizer)
        with pytest.raises(DistributedAlreadyError):
            hvd.AsyncDistributedOptimizer(hvd.DistributedOptimizer(sgd(0.1)), model)
        ones = [tf.ones(v.shape, "float64") for v in model.trainable_variables]
        variable = model.trainable_variables[0]
        for call, text in (
            (lambda: keras.optimizers.LossScaleOptimizer(optimizer), "LossScaleOptimizer does not work"),
            (lambda: optimizer.exclude_from_weight_decay(var_names=["bias"]), "before you wrap"),
            (lambda: optimizer.set_batch_weight(-1), "expected the number of this rank's samples"),
            (lambda: optimizer.build(model.trainable_variables[1:]), "the servers have other variables"),
            (lambda: optimizer.apply(ones[:2], model.trainable_variables), "2 gradients for 4 variables"),
            (lambda: optimizer.apply([ones[0], ones[0]], [variable, variable]), "a variable comes twice"),
            (lambda: optimizer.apply([ones[1]], [variable]), r"has the shape \(8,\): expected \(5, 8\)"),
        ):
            with pytest.raises(ArgumentError, match=text):
                call()
        with pytest.raises(ValueError, match="Unknown variable"):
            optimizer.apply(ones[:1], make_model().trainable_variables[:1])
        compiled = tf.function(optimizer.apply, jit_compile=True)
        with pytest.raises(ArgumentError, match="XLA cannot compile"):
            compiled(ones)
        optimizer.finish()
        optimizer.finish()
        for call in (
            lambda: optimizer.apply(ones, model.trainable_variables),
            optimizer.synchronize,
            optimizer.restart,
        ):
            with pytest.raises(ArgumentError, match=re.escape("finish() was called")):
                call()

    ranks(check)


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (hvd.callbacks.Distributed, "hvd.callbacks.Distributed lets the ranks wait"),
        (hvd.callbacks.UnevenDataCallback, "hvd.callbacks.UnevenDataCallback lets the ranks wait"),
        (lambda: hvd.callbacks.LearningRateWarmupCallback(0.1, 1), "momentum_correction=False"),
    ],
    ids=["all", "uneven", "warm-up"],
)
def test_callbacks_that_do_not_fit(ranks: Any, callback: Any, text: str) -> None:
    def check() -> None:
        model = make_model()
        optimizer = hvd.AsyncDistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), model)
        model.compile(optimizer, loss="mse")
        with pytest.raises(ArgumentError, match=text):
            model.fit(*share(0, 1), verbose=0, callbacks=[callback()])
        optimizer.finish()

    ranks(check)


class Fails(keras.optimizers.SGD):
    """Raises in the third step of training."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.made = getattr(self, "made", 0) + 1
        if self.made == 3 and len(trainable_variables) > 2:
            raise ZeroDivisionError("the third step")
        super().apply(grads, trainable_variables)


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_fails_on_its_server(ranks: Any, mode: str) -> None:
    def check() -> None:
        variables = [tf.Variable(tf.zeros(3)) for _ in range(3 * hvd.size())]
        optimizer = hvd.AsyncDistributedOptimizer(Fails(0.1), variables, **MODES[mode])
        apply = tf.function(optimizer.apply, autograph=False)

        def steps() -> None:
            for _ in range(4):
                apply([tf.ones(3)] * len(variables))

        with pytest.raises(tf.errors.UnknownError, match="failed on its server: ZeroDivisionError: the third step"):
            steps()
        with pytest.raises(CommunicationError, match="third step"):
            optimizer.finish()

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_what_the_ranks_do_differently(ranks: Any) -> None:
    def check() -> None:
        rank = hvd.rank()
        for settings, arguments in (({"momentum": 0.1 * rank}, {}), ({}, {"push_every": 1 + rank})):
            with pytest.raises(MismatchError, match="what AsyncDistributedOptimizer is given"):
                hvd.AsyncDistributedOptimizer(keras.optimizers.SGD(0.1, **settings), make_model(), **arguments)
        model = make_model()
        optimizer = hvd.AsyncDistributedOptimizer(keras.optimizers.SGD(0.1), model, mode="sync")
        optimizer.learning_rate = 1.0 + rank
        with pytest.raises(CommunicationError, match="push with different learning rates"):
            plain_steps(optimizer, model, range(1))

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_some_ranks_only(ranks: Any) -> None:
    plainly = make_model()
    plain_steps(keras.optimizers.SGD(0.1), plainly, range(1))

    def check() -> None:
        some = hvd.new_group([0, hvd.size() - 1])
        if some.included():
            model = make_model(1.0 + hvd.rank())
            with hvd.AsyncDistributedOptimizer(
                keras.optimizers.SGD(0.1), model, mode="sync", process_set=some
            ) as optimizer:
                plain_steps(optimizer, model, range(1))
            assert distance(flat(model), flat(plainly)) < TOLERANCE
        hvd.barrier()

    ranks(check)
