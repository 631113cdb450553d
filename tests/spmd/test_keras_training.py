"""Keras: training on several ranks equals training in one process on the joined batch."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.adapter.buckets import HostBuckets
from hvdlite.config import Config
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError, NotInitializedError, UnsupportedTensorError
from hvdlite.gradients.reducer import Reducer
from hvdlite.testing import on_ranks
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # Ranks that are threads share TensorFlow's pool: it needs a thread for each rank that waits for the others.
    # Raises if TensorFlow's runtime was started, by a test module or by an import of hvdlite_tf; neither may do that.
    tf.config.threading.set_inter_op_parallelism_threads(8)

_rng = np.random.default_rng(7)
BATCHES, ROWS = 4, 12
X = _rng.standard_normal((BATCHES, ROWS, 10)).astype("float32")
Y = _rng.integers(0, 4, (BATCHES, ROWS))
WEIGHTS = [_rng.standard_normal(shape).astype("float32") * 0.3 for shape in [(10, 16), (16,), (16, 4), (4,)]]


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-2),
    "all settings": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.02, decay_steps=4, decay_rate=0.8),
        weight_decay=1e-2,
        global_clipnorm=0.05,
        use_ema=True,
        ema_overwrite_frequency=3,
    ),
    "accumulating": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipvalue=0.01, gradient_accumulation_steps=2),
}


def make_model(optimizer: Any, **compile_options: Any) -> Any:
    model = keras.Sequential(
        [keras.layers.Input((10,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(4)]
    )
    model.set_weights(WEIGHTS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, **compile_options)
    return model


def fit(model: Any, rank: int, size: int, epochs: int = 5, **options: Any) -> Any:
    """This rank's equal share of each batch; 20 steps."""
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    x, y = X[:, rows].reshape(-1, 10), Y[:, rows].reshape(-1)
    return model.fit(x, y, batch_size=ROWS // size, epochs=epochs, shuffle=False, verbose=0, **options)


@functools.cache
def single(kind: str) -> np.ndarray:
    model = make_model(OPTIMIZERS[kind]())
    fit(model, 0, 1)
    return flat(model)


def flat(model: Any) -> np.ndarray:
    return np.concatenate([weight.reshape(-1) for weight in model.get_weights()])


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def assert_equal_everywhere(weights: np.ndarray) -> None:
    assert all(np.array_equal(weights, other) for other in hvd.allgather_object(weights))


@pytest.mark.costly
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_fit_equals_one_process_on_the_joined_batch(ranks: Any, kind: str) -> None:
    expected = single(kind)

    def check() -> None:
        model = make_model(hvd.DistributedOptimizer(OPTIMIZERS[kind]()))
        fit(model, hvd.rank(), hvd.size())
        assert distance(flat(model), expected) <= 1e-5
        assert_equal_everywhere(flat(model))

    ranks(check)


@pytest.mark.costly
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("all settings", {}),
        ("accumulating", {}),
        ("sgd", {"run_eagerly": True}),
        ("accumulating", {"run_eagerly": True}),
        ("sgd", {"steps_per_execution": 4}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_fit_with_other_settings(ranks: Any, kind: str, options: dict[str, Any]) -> None:
    def check() -> None:
        model = make_model(hvd.DistributedOptimizer(OPTIMIZERS[kind]()), **options)
        fit(model, hvd.rank(), hvd.size())
        assert distance(flat(model), single(kind)) <= 1e-5
        assert_equal_everywhere(flat(model))

    ranks(check)


def test_accumulated_gradients_are_exchanged_once_per_update(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    exchange = HostBuckets.exchange
    monkeypatch.setattr(HostBuckets, "exchange", lambda self, *args: calls.append(self) or exchange(self, *args))

    def check() -> None:
        variable = tf.Variable([0.0] * 7)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=3))

        @tf.function
        def step(gradient: Any) -> None:
            optimizer.apply_gradients([(gradient, variable)])

        optimizer.build([variable])
        for number in range(6):
            step(tf.constant([float(number + hvd.rank())] * 7))
        assert np.allclose(variable.numpy(), -((0 + 1 + 2) / 3 + (3 + 4 + 5) / 3 + hvd.size() - 1))
        hvd.barrier()
        assert bool(calls) == (hvd.size() > 1)

    ranks(check)
    assert [calls.count(buckets) for buckets in set(calls)] == [2] * len(set(calls))


@pytest.mark.parametrize("graph", [True, False])
def test_apply_gradients_of_all_dtypes(ranks: Any, graph: bool) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        dtypes = ["float64", "bfloat16", "float16", "float32", "bfloat16"]
        variables = [keras.Variable(np.ones((3, 2)), dtype=dtype) for dtype in dtypes] + [tf.Variable(1.0)]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build(variables)

        def step() -> None:
            gradients = [tf.fill(variable.shape, tf.cast(2.0 * rank, variable.dtype)) for variable in variables]
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        run = tf.function(step) if graph else step
        for number in range(1, 3):
            run()
            for variable in variables:
                assert (np.asarray(variable.numpy(), float) == 1 - number * (size - 1)).all()
        assert optimizer.iterations.numpy() == 2

    ranks(check)


def test_sum(ranks: Any) -> None:
    def check() -> None:
        variable = tf.Variable(tf.zeros(3))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
        optimizer.apply_gradients([(tf.ones(3), variable)])
        optimizer.apply([tf.ones(3)])  # without variables: those that it was built for
        assert (variable.numpy() == -2 * hvd.size()).all()

    ranks(check)


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("accumulating", [True, False])
def test_variables_without_gradients(ranks: Any, graph: bool, accumulating: bool) -> None:
    """Unused everywhere: left alone, by weight decay too. Unused on some ranks: zero there."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        used, unused, first_only = variables = [keras.Variable([1.0, 1.0], name=name) for name in ("a", "b", "c")]
        steps = 2 if accumulating else None
        plain = keras.optimizers.SGD(0.5, weight_decay=0.5, gradient_accumulation_steps=steps)
        optimizer = hvd.DistributedOptimizer(plain)

        def step(gradients: Any) -> None:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        run = tf.function(step) if graph else step
        for number in range(1, 3):
            for _ in range(steps or 1):
                run([tf.fill([2], float(rank)), None, tf.ones(2) if rank == 0 else None])
            decayed = 0.75 if number == 1 else 0.75 * (0.75 - 0.5 / size)
            assert np.allclose(first_only.numpy(), decayed - 0.5 / size)
        assert np.allclose(used.numpy(), (0.75 - (size - 1) / 4) * 0.75 - (size - 1) / 4)
        assert (unused.numpy() == 1).all()

    ranks(check)


@pytest.mark.skipif(UNDER_MPI, reason="it ends the job")
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
def test_gradients_that_differ_in_one_ranks_later_function() -> None:
    """Nobody has told the others: the rank that has nowhere to put the result says so."""

    def check() -> None:
        variables = [keras.Variable([1.0]), keras.Variable([1.0])]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
        run = tf.function(lambda last: optimizer.apply_gradients(zip([tf.ones(1), last], variables, strict=True)))
        run(tf.ones(1))
        run(tf.ones(1) if hvd.rank() == 0 else None)

    with pytest.raises(Exception, match="HvdliteError: this rank has no gradient of"):
        on_ranks(2, check, config=Config(deadlock_time_seconds=0.3))


def test_embeddings(ranks: Any) -> None:
    """Sparse gradients of different rows. (With Adam, Keras itself is wrong where a row comes twice: see `_dense`.)"""
    tokens = np.array([[1, 2], [3, 1], [5, 5], [0, 2], [7, 1], [4, 3], [2, 2], [6, 0], [1, 1], [3, 4], [5, 6], [0, 0]])
    table = _rng.standard_normal((8, 3)).astype("float32")

    def train(rank: int, size: int, optimizer: Any) -> np.ndarray:
        model = keras.Sequential([keras.layers.Input((2,), dtype="int32"), keras.layers.Embedding(8, 3)])
        model.set_weights([table])
        model.compile(optimizer=optimizer, loss="mse")
        share = len(tokens) // size
        rows = slice(rank * share, (rank + 1) * share)
        model.fit(tokens[rows], np.ones((12, 2, 3))[rows], batch_size=share, epochs=4, verbose=0, shuffle=False)
        return flat(model)

    expected = train(0, 1, keras.optimizers.SGD(0.1, momentum=0.9))

    def check() -> None:
        got = train(hvd.rank(), hvd.size(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
        assert distance(got, expected) <= 1e-5

    ranks(check)


@pytest.mark.parametrize("graph", [True, False])
def test_ranks_with_different_numbers_of_rows(ranks: Any, graph: bool) -> None:
    """`set_batch_weight`: the weighted mean, in functions that were traced before, too."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        variable = keras.Variable([0.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build([variable])
        step = functools.partial(lambda x: optimizer.apply([x], [variable]), tf.constant([float(rank + 1)]))
        run = tf.function(step) if graph else step
        expected = 0.0
        for numbers in ([1.0] * size, [float(r) for r in range(1, size + 1)], [0.0] * (size - 1) + [3.0]):
            optimizer.set_batch_weight(numbers[rank])
            run()
            expected -= np.average(np.arange(1, size + 1), weights=numbers)
            assert np.allclose(variable.numpy(), expected)

    ranks(check)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "LossScaleOptimizer"])
def test_backward_passes_per_step(ranks: Any, average: bool, scaled: bool) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        variable = keras.Variable([0.0])
        plain = keras.optimizers.SGD(1.0, clipvalue=50.0)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(plain, initial_scale=4.0) if scaled else plain,
            backward_passes_per_step=3,
            average_aggregated_gradients=average,
        )
        optimizer.build([variable])
        step = tf.function(lambda x: optimizer.apply([x], [variable]))
        for number in range(6):
            before = float(variable.numpy()[0])
            step(tf.constant([(4.0 if scaled else 1.0) * (number + rank)]))
            if number % 3 < 2:
                assert variable.numpy() == before
        total = sum(range(6)) + 6 * (size - 1) / 2
        assert np.allclose(variable.numpy(), -total / (3 if average else 1))

    ranks(check)


def test_local_variables(ranks: Any) -> None:
    """Each rank has its own, of another shape even; `join` leaves them and their momentum alone."""

    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        shared, own = keras.Variable([0.0]), keras.Variable(np.zeros(rank + 1, "float32"))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5))
        optimizer.build([shared, own])
        optimizer.register_local_var(own)
        step = tf.function(lambda x: optimizer.apply([tf.fill([1], x), tf.fill([rank + 1], x)], [shared, own]))
        for _ in range(2):
            step(rank + 1.0)
        hvd.join()
        assert np.allclose(shared.numpy(), -(1 + 1.5) * (size + 1) / 2)
        assert np.allclose(own.numpy(), -(1 + 1.5) * (rank + 1) / size)
        step(0.0)
        assert np.allclose(own.numpy(), -(1 + 1.5 + 0.75) * (rank + 1) / size)

    ranks(check)


def test_two_optimizers_in_one_function(ranks: Any) -> None:
    """Nested functions with no variable in common are not ordered by TensorFlow."""

    def check() -> None:
        pairs, steps = [], []
        for number in (1, 2):
            variables = [tf.Variable(tf.zeros(5)), tf.Variable(tf.zeros(2))]
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
            optimizer.build(variables)
            gradients = [tf.fill(variable.shape, number * (hvd.rank() + 1.0)) for variable in variables]
            pairs.append((number, variables))
            steps.append(
                tf.function(functools.partial(optimizer.apply_gradients, list(zip(gradients, variables, strict=True))))
            )

        @tf.function
        def both() -> None:
            for step in steps:
                step()

        for _ in range(30):
            both()
        for number, variables in pairs:
            for variable in variables:
                assert np.allclose(variable.numpy(), -30 * number * (hvd.size() + 1) / 2)

    ranks(check)


def test_loss_scale(ranks: Any) -> None:
    """All ranks skip a step whose gradients overflow on one of them."""

    def check() -> None:
        variable = keras.Variable([1.0])
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
        optimizer = hvd.DistributedOptimizer(scaled)
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        last = hvd.rank() == hvd.size() - 1

        @tf.function
        def step(gradient: Any) -> None:
            optimizer.apply_gradients([(gradient, variable)])

        step(tf.constant([np.inf if last else 1.0]))
        assert variable.numpy() == 1
        assert optimizer.dynamic_scale.numpy() == 2
        step(tf.constant([2.0 * hvd.rank()]))
        assert variable.numpy() == 1 - (hvd.size() - 1) / 2

    ranks(check)


@pytest.mark.costly
@pytest.mark.parametrize("wrap", ["compile", "inside", "outside"])
def test_mixed_float16(ranks: Any, wrap: str) -> None:
    """The scale of the loss is outside of the exchange however it is put there, and the result that of the joined batch."""

    def model(optimizer: Any) -> Any:
        made = keras.Sequential([keras.layers.Input((10,)), keras.layers.Dense(4, dtype="mixed_float16")])
        made.set_weights([WEIGHTS[0][:, :4], WEIGHTS[3]])
        made.dtype_policy = keras.DTypePolicy("mixed_float16")
        made.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made

    expected = model(keras.optimizers.SGD(0.1))
    if wrap == "compile":
        fit(expected, 0, 1, epochs=2)

    def check() -> None:
        plain = keras.optimizers.SGD(0.1)
        if wrap == "compile":
            made = model(hvd.DistributedOptimizer(plain))
        elif wrap == "inside":
            made = model(hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(plain)))
        else:
            made = model(keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(plain)))
        assert isinstance(made.optimizer, keras.optimizers.LossScaleOptimizer)
        assert made.optimizer.inner_optimizer is plain
        assert type(plain) is keras.optimizers.SGD
        for again in (made.optimizer, plain):
            with pytest.raises(ArgumentError, match="distributed already"):
                hvd.DistributedOptimizer(again)
        assert type(keras.optimizers.deserialize(keras.optimizers.serialize(made.optimizer))) is not type(
            made.optimizer
        )
        if wrap == "compile" and hvd.size() > 1:
            fit(made, hvd.rank(), hvd.size(), epochs=2)
            assert distance(flat(made), flat(expected)) <= 1e-3  # float16 has 11 bits
            assert_equal_everywhere(flat(made))

    ranks(check)


@pytest.mark.ranks(at_least=3)
def test_a_process_set_trains_alone(ranks: Any) -> None:
    def check() -> None:
        pair = hvd.add_process_set([0, hvd.size() - 1])
        if pair.included():
            variable = keras.Variable([0.0])
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, process_set=pair)
            optimizer.apply([tf.ones(1)], [variable])
            assert variable.numpy() == -2
            variable.assign([float(hvd.rank())])
            hvd.broadcast_variables([variable], hvd.size() - 1, process_set=pair)
            assert variable.numpy() == hvd.size() - 1
        hvd.barrier()
        hvd.remove_process_set(pair)

    ranks(check)


def test_it_stays_the_optimizer_that_it_was(ranks: Any) -> None:
    def check() -> None:
        plain = OPTIMIZERS["adam"]()
        before = keras.saving.serialize_keras_object(plain)
        optimizer = hvd.DistributedOptimizer(plain)
        assert optimizer is plain
        assert isinstance(optimizer, keras.optimizers.Adam)
        assert type(optimizer).__name__ == "Adam"
        assert keras.saving.serialize_keras_object(optimizer) == before
        assert keras.optimizers.get(optimizer) is optimizer
        optimizer.learning_rate = 0.25
        assert float(optimizer.learning_rate) == 0.25
        for twin in (
            keras.optimizers.deserialize(keras.optimizers.serialize(optimizer)),
            copy.deepcopy(optimizer),
            pickle.loads(pickle.dumps(optimizer)),
        ):
            assert type(twin) is keras.optimizers.Adam
            assert float(twin.learning_rate) == 0.25

    ranks(check)


def test_an_optimizer_that_was_used_keeps_its_state(ranks: Any) -> None:
    def check() -> None:
        variable = keras.Variable([0.0])
        plain = keras.optimizers.SGD(1.0, momentum=0.5)
        plain.apply([tf.ones(1)], [variable])
        optimizer = hvd.DistributedOptimizer(plain)
        optimizer.apply([tf.constant([2.0 * hvd.rank()])], [variable])
        assert variable.numpy() == -1 - 0.5 - (hvd.size() - 1)
        assert optimizer.iterations.numpy() == 2

    ranks(check)


LOAD = """
import sys
sys.modules["hvdlite"] = sys.modules["hvdlite_tf"] = None  # an import of these fails
import keras, numpy as np
model = keras.models.load_model(sys.argv[1])
assert type(model.optimizer) is keras.optimizers.Adam
state = [np.asarray(v) for v in [*model.weights, *model.optimizer.variables]]
expected = np.load(sys.argv[2])
assert len(state) == len(expected.files) > 10
assert all(np.array_equal(expected[f"arr_{i}"], a) for i, a in enumerate(state))
model.load_weights(sys.argv[4])
import tensorflow as tf
x = np.ones((2, 10), "float32")
exported = tf.saved_model.load(sys.argv[3])
assert np.allclose(exported.serve(x), model(x), atol=1e-6)
model.fit(np.ones((4, 10)), np.ones(4), verbose=0)
assert type(keras.models.load_model(sys.argv[1]).optimizer) is keras.optimizers.Adam
"""


@pytest.mark.slow
@pytest.mark.skipif(UNDER_MPI, reason="about files and another process, not about ranks; done once, on threads")
def test_a_process_without_hvdlite_loads_the_model(tmp_path: Path) -> None:
    files = tmp_path / "model.keras", tmp_path / "state.npz", tmp_path / "exported", tmp_path / "saved.weights.h5"

    def check() -> None:
        model = make_model(hvd.DistributedOptimizer(OPTIMIZERS["adam"]()))
        fit(model, hvd.rank(), hvd.size(), epochs=1)
        if hvd.rank() == 0:
            model.save(files[0])
            np.savez(files[1], *(v.numpy() for v in [*model.weights, *model.optimizer.variables]))
            model.export(files[2], verbose=False)
            model.save_weights(files[3])

    on_ranks(2, check)

    def resume() -> None:
        """On another number of ranks: as one process goes on."""
        model = keras.models.load_model(files[0])
        model.optimizer = hvd.DistributedOptimizer(model.optimizer)
        fit(model, hvd.rank(), hvd.size(), epochs=4)
        assert distance(flat(model), single("adam")) <= 1e-5

    single("adam")
    on_ranks(3, resume)
    done = subprocess.run([sys.executable, "-c", LOAD, *map(str, files)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"op": hvd.Max}, "Average or Sum"),
    ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average"),
    ({"gradient_predivide_factor": 0.0}, "above 0"),
    ({"backward_passes_per_step": 0}, "from 1 on"),
]


def test_bad_use(ranks: Any) -> None:
    def check() -> None:
        for bad in ("adam", keras.optimizers.Adam, object()):
            with pytest.raises(
                ArgumentError, match=r"expected an optimizer of Keras 3.*got builtins|got builtins.type"
            ):
                hvd.DistributedOptimizer(bad)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        with pytest.raises(ArgumentError, match="distributed already"):
            hvd.DistributedOptimizer(optimizer)
        optimizer.build([tf.Variable([1.0])])
        with pytest.raises(ValueError, match="Unknown variable"):
            optimizer.apply([tf.ones(1)], [tf.Variable([1.0])])
        for options, message in BAD_OPTIONS:
            with pytest.raises(ArgumentError, match=message):
                hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)
        with pytest.raises(ArgumentError, match="means the same"):
            hvd.DistributedOptimizer(
                keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), backward_passes_per_step=2
            )
        used = keras.optimizers.SGD(0.1)
        used.build([tf.Variable([1.0])])
        with pytest.raises(ArgumentError, match="has been used"):
            hvd.DistributedOptimizer(used, backward_passes_per_step=2)
        with pytest.raises(ArgumentError, match="0 or more"):
            optimizer.set_batch_weight(-1.0)
        with pytest.raises(ArgumentError, match="for averages"):
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum).set_batch_weight(2.0)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_xla_is_refused(ranks: Any) -> None:
    def check() -> None:
        model = make_model(hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()), jit_compile=True)
        with pytest.raises(ArgumentError, match="jit_compile=False"):
            fit(model, hvd.rank(), hvd.size())

    ranks(check)


def test_other_optimizers_and_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    if not UNDER_MPI:
        with pytest.raises(NotInitializedError):
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))

    def check() -> None:
        monkeypatch.setattr(keras.backend, "backend", lambda: "openvino")
        with pytest.raises(ArgumentError, match="its backend is openvino"):
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))

    on_ranks(1, check)


def test_different_models_are_a_mismatch(ranks: Any) -> None:
    def check() -> None:
        if hvd.size() > 1:
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
            with pytest.raises(MismatchError, match="gradient buckets"):
                optimizer.apply([tf.ones(3 + hvd.rank())], [tf.Variable(tf.zeros(3 + hvd.rank()))])

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_an_error_of_the_exchange_is_named(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *args: Any) -> None:
        raise HvdliteError("the network is gone")

    monkeypatch.setattr(Reducer, "exchange", fail)

    def check() -> None:
        variable = tf.Variable([1.0])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        with pytest.raises(HvdliteError, match="the network is gone"):
            optimizer.apply([tf.ones(1)], [variable])
        with pytest.raises(tf.errors.UnknownError, match="HvdliteError: the network is gone"):
            tf.function(lambda: optimizer.apply([tf.ones(1)], [variable]))()
        assert variable.numpy() == 1

    ranks(check)


def test_broadcast_variables(ranks: Any) -> None:
    def check() -> None:
        rank, root = hvd.rank(), hvd.size() - 1
        variables = [
            tf.Variable(tf.fill([2, 3], float(rank))),
            keras.Variable([rank], dtype="bfloat16"),
            keras.Variable(rank, dtype="int32", trainable=False),
        ]
        hvd.broadcast_variables(variables, root)
        assert all((np.asarray(variable.numpy(), float) == root).all() for variable in variables)
        with pytest.raises(UnsupportedTensorError, match="expected a variable"):
            hvd.broadcast_variables([tf.ones(2)])

    ranks(check)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("trained", [True, False])
def test_the_callback_gives_all_ranks_one_start(ranks: Any, trained: bool) -> None:
    """Weights and optimizer state come from the root; random numbers do not."""
    expected = make_model(OPTIMIZERS["sgd"]())
    if trained:
        fit(expected, 0, 1, epochs=2)
    expected.optimizer.build(expected.trainable_variables)
    weights, state = expected.get_weights(), [variable.numpy() for variable in expected.optimizer.variables]
    fit(expected, 0, 1, epochs=2)

    def check() -> None:
        rank, root = hvd.rank(), hvd.size() - 1
        model = make_model(hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()))
        model.set_weights([weight + (root - rank) for weight in weights])
        if rank == root and trained:  # as after load_model; the others' optimizers are not built yet
            model.optimizer.build(model.trainable_variables)
            for variable, value in zip(model.optimizer.variables, state, strict=True):
                variable.assign(value)
        model.dropout = keras.layers.Dropout(0.5, seed=rank)
        random = model.dropout.seed_generator.state.numpy().copy()
        fit(model, rank, hvd.size(), epochs=2, callbacks=[hvd.BroadcastGlobalVariablesCallback(root)])
        assert distance(flat(model), flat(expected)) <= 1e-5
        assert_equal_everywhere(flat(model))
        assert np.array_equal(model.dropout.seed_generator.state.numpy(), random)

    ranks(check)


def test_the_callback_needs_a_model_that_is_built(ranks: Any) -> None:
    def check() -> None:
        model = keras.Sequential([keras.layers.Dense(4)])
        if hvd.rank() > 0:
            model.build((None, 10))
        model.compile(hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()), "mse")
        with pytest.raises(ArgumentError, match=r"no weights yet on ranks \[0\]"):
            model.fit(np.ones((4, 10)), np.ones((4, 4)), verbose=0, callbacks=[hvd.BroadcastGlobalVariablesCallback()])

    ranks(check)
