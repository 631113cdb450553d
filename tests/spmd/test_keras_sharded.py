"""Keras with ``shard=True``: each rank steps its share, and training equals that of one process with a plain optimizer."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError, UnsupportedTensorError
from hvdlite.testing import on_ranks
from hvdlite_tf.optimizers import shards
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: ranks that are threads share TensorFlow's pool.
    tf.config.threading.set_inter_op_parallelism_threads(8)

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")

from_keras = keras.optimizers
SHAPES = [(40, 16), (16,), (16, 4), (4,)]
NAMES = ["first/kernel", "first/bias", "second/kernel", "second/bias"]
STEPS = 6
_start = np.random.default_rng(1)
START = [_start.standard_normal(shape).astype("float32") for shape in SHAPES]


def decayed() -> Any:
    optimizer = from_keras.AdamW(1e-2, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


class SignOfMean(from_keras.Optimizer):  # type: ignore[misc]
    """Steps each variable by the sign of the mean of its gradient: no element by itself."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_sub(
            variable, keras.ops.sign(keras.ops.mean(gradient)) * learning_rate * keras.ops.ones_like(variable)
        )


class Together(SignOfMean):
    """Steps a variable by how many there are."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_sub(variable, gradient * learning_rate * len(self._trainable_variables))


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: from_keras.SGD(0.1),
    "momentum": lambda: from_keras.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: from_keras.Adam(1e-2),
    "adam, clipnorm": lambda: from_keras.Adam(1e-2, clipnorm=0.5, amsgrad=True),
    "decay but of biases": decayed,
    "all settings": lambda: from_keras.AdamW(
        from_keras.schedules.ExponentialDecay(0.02, decay_steps=2, decay_rate=0.8),
        weight_decay=1e-2,
        global_clipnorm=0.05,
        use_ema=True,
        ema_overwrite_frequency=2,
    ),
    "moving averages": lambda: from_keras.SGD(0.1, use_ema=True, ema_momentum=0.5),
    "accumulating": lambda: from_keras.SGD(0.1, momentum=0.9, clipnorm=0.3, gradient_accumulation_steps=2),
    "accumulating averages": lambda: from_keras.SGD(
        0.1, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "clipvalue": lambda: from_keras.RMSprop(1e-2, centered=True, momentum=0.5, clipvalue=0.1),
    "nadam": lambda: from_keras.Nadam(1e-2),
    "ftrl": lambda: from_keras.Ftrl(1e-2),
    "lamb": lambda: from_keras.Lamb(1e-2, clipnorm=0.5),
    "adafactor": lambda: from_keras.Adafactor(1e-2),
    "muon": lambda: from_keras.Muon(1e-2, exclude_layers=["second"]),
    "own": lambda: SignOfMean(0.25),
    "scaled": lambda: from_keras.LossScaleOptimizer(
        from_keras.Adam(1e-2, global_clipnorm=0.5), initial_scale=4.0, dynamic_growth_steps=2
    ),
}


def variables_of(scale: float = 1.0) -> list[Any]:
    made = [keras.Variable(value * scale, name=name.split("/")[1]) for value, name in zip(START, NAMES, strict=True)]
    for variable, name in zip(made, NAMES, strict=True):
        variable._path = name
    return made


def gradients_of(step: int, rank: int, missing: Sequence[int] = ()) -> list[np.ndarray | None]:
    random = np.random.default_rng([step, rank])
    found = [random.standard_normal(shape).astype("float32") for shape in SHAPES]
    return [None if place in missing else each for place, each in enumerate(found)]


def tensors(gradients: Sequence[Any], scale: float = 1.0) -> list[Any]:
    return [None if each is None else tf.constant(each) * scale for each in gradients]


def mean_of(step: int, size: int, missing: Sequence[int] = ()) -> list[Any]:
    everybody = [gradients_of(step, rank, missing) for rank in range(size)]
    return [
        None if of[0] is None else np.mean(of, axis=0, dtype=np.float64).astype("float32")
        for of in zip(*everybody, strict=True)
    ]


def values_of(variables: Sequence[Any]) -> list[np.ndarray]:
    return [np.array(variable) for variable in variables]


def scale_of(optimizer: Any) -> float:
    return float(optimizer.scale_loss(1.0))


@functools.cache
def single(kind: str, size: int, missing: tuple[int, ...] = ()) -> list[np.ndarray]:
    variables, optimizer = variables_of(), OPTIMIZERS[kind]()
    optimizer.build(variables)
    for step in range(STEPS):
        optimizer.apply(tensors(mean_of(step, size, missing), scale_of(optimizer)), variables)
    optimizer.finalize_variable_values(variables)
    return values_of(variables)


def assert_close(got: Sequence[np.ndarray], expected: Sequence[np.ndarray], within: float = 3e-6) -> None:
    for one, other in zip(got, expected, strict=True):
        assert np.abs(one - other).max() <= within * max(1.0, np.abs(other).max())


def assert_equal_everywhere(got: Sequence[np.ndarray]) -> None:
    for other in hvd.allgather_object(list(got)):
        assert all(map(np.array_equal, got, other))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of some hundred elements are cut as those of a million are."""
    monkeypatch.setattr(shards, "_length", lambda owned: 128)


@pytest.mark.costly
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("kind", ["all settings", *(kind for kind in OPTIMIZERS if kind != "all settings")])
def test_steps_equal_those_of_a_plain_optimizer(ranks: Any, kind: str) -> None:
    def check() -> None:
        variables = variables_of()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](), shard=True)
        optimizer.build(variables)
        for step in range(STEPS):
            optimizer.apply(tensors(gradients_of(step, hvd.rank()), scale_of(optimizer)), variables)
        optimizer.finalize_variable_values(variables)
        # The sign of a mean near 0, and Newton's iterations of Muon, magnify the rounding of the mean.
        assert_close(values_of(variables), single(kind, hvd.size()), 1e-3 if kind == "muon" else 3e-6)
        assert_equal_everywhere(values_of(variables))
        if hvd.size() > 1 and kind == "adam":
            held = hvd.allgather_object(sum(np.size(each) for each in optimizer.variables))
            assert max(held) < sum(held) * 0.75  # no rank has the state of all

    ranks(check)


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["all settings", "accumulating", "scaled"])
@pytest.mark.slow
def test_functions_and_variables_without_gradients(ranks: Any, kind: str) -> None:
    """In a tf.function, with an optimizer that is built there, and a variable that has no gradient on any rank."""

    def check() -> None:
        variables = variables_of()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](), shard=True)
        if kind == "scaled":
            optimizer.build(variables)

        @tf.function
        def train(given: list[Any]) -> None:
            scaled = [each if kind != "scaled" else each * optimizer.dynamic_scale for each in given]
            optimizer.apply_gradients(zip([scaled[0], None, scaled[1], scaled[2]], variables, strict=True))

        for step in range(STEPS):
            train([tf.constant(each) for each in gradients_of(step, hvd.rank(), (1,)) if each is not None])
        optimizer.finalize_variable_values(variables)
        assert_close(values_of(variables), single(kind, hvd.size(), (1,)))
        assert_equal_everywhere(values_of(variables))

    ranks(check)


def model_of(optimizer: Any, **options: Any) -> Any:
    inner = keras.layers.Dense(16, activation="tanh", kernel_constraint=options.pop("constraint", None))
    model = keras.Sequential([keras.layers.Input((10,)), inner, keras.layers.Dense(4)])
    random = np.random.default_rng(3)
    model.set_weights([random.standard_normal(each.shape) * 0.3 for each in model.weights])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


_data = np.random.default_rng(7)
X, Y = _data.standard_normal((4, 12, 10)).astype("float32"), _data.integers(0, 4, (4, 12))


def fit(model: Any, rank: int, size: int, **options: Any) -> Any:
    rows = slice(rank * 12 // size, (rank + 1) * 12 // size)
    x, y = X[:, rows].reshape(-1, 10), Y[:, rows].reshape(-1)
    return model.fit(x, y, batch_size=12 // size, epochs=2, shuffle=False, verbose=0, **options)


FITS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "averages": (lambda: from_keras.Adam(1e-2, use_ema=True), {}),
    "several steps": (lambda: from_keras.Adam(1e-2), {"steps_per_execution": 2}),
    "constraint": (lambda: from_keras.Adam(1e-1), {"constraint": "unit_norm"}),
}


@pytest.mark.costly
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize("kind", list(FITS))
def test_fit_equals_one_process(ranks: Any, kind: str, tmp_path: Path) -> None:
    make, options = FITS[kind]
    alone = model_of(make(), **options)
    fit(alone, 0, 1)

    def check() -> None:
        model = model_of(hvd.DistributedOptimizer(make(), shard=True), **options)
        if hvd.rank():  # which the callback makes equal
            model.set_weights([each * 0 for each in model.get_weights()])
        file = str(tmp_path / "model.keras")
        fit(model, hvd.rank(), hvd.size(), callbacks=[hvd.callbacks.Distributed(checkpoint=file)])
        assert_close(model.get_weights(), alone.get_weights(), 2e-5)
        assert_equal_everywhere(model.get_weights())
        if hvd.rank() == 0:
            loaded = keras.models.load_model(file)
            assert type(loaded.optimizer) is from_keras.Adam
            assert int(loaded.optimizer.iterations) == 8
            for one, other in zip(loaded.optimizer.variables, alone.optimizer.variables, strict=True):
                assert_close([np.array(one)], [np.array(other)], 2e-5)

    ranks(check)


@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("all settings", "file"),
        ("scaled", "file"),
        ("adafactor", "checkpoint"),
        ("scaled", "elastic"),
        ("adam", "elastic"),
    ],
)
def test_saved_state_goes_on_as_before(ranks: Any, kind: str, how: str, tmp_path: Path) -> None:
    """Saved in the middle, and loaded into new optimizers: sharded ones, and a plain one."""

    def steps(optimizer: Any, variables: list[Any], begin: int, end: int, mine: Callable[[int], Any]) -> None:
        for step in range(begin, end):
            optimizer.apply(tensors(mine(step), scale_of(optimizer)), variables)

    def check() -> None:
        path = Path(hvd.broadcast_object(str(tmp_path / "of rank 0"), 0))

        def mine(step: int) -> Any:
            return gradients_of(step, hvd.rank())

        def made(shard: bool = True) -> Any:
            model = keras.Sequential([keras.layers.Input((40,)), keras.layers.Dense(16), keras.layers.Dense(4)])
            model.set_weights(START)
            optimizer = OPTIMIZERS[kind]()
            model.compile(hvd.DistributedOptimizer(optimizer, shard=True) if shard else optimizer, "mse")
            model.optimizer.build(model.trainable_variables)
            return model

        model = made()
        steps(model.optimizer, model.trainable_variables, 0, 3, mine)
        anew = made()
        if how == "file":
            with pytest.raises(ArgumentError, match="whole_state"):
                model.save(f"{path}.rank{hvd.rank()}.keras")
            with model.optimizer.whole_state():
                if hvd.rank() == 0:
                    model.save_weights(f"{path}.weights.h5")
            hvd.barrier()
            anew.load_weights(f"{path}.weights.h5")
            plain = made(shard=False)
            plain.load_weights(f"{path}.weights.h5")
            steps(plain.optimizer, plain.trainable_variables, 3, STEPS, lambda step: mean_of(step, hvd.size()))
        elif how == "checkpoint":
            hvd.checkpoint.save(path, model=model)
            hvd.checkpoint.load(path, model=anew)
        else:
            state = hvd.elastic.KerasState(model)
            state.commit()
            saved = state.saved()
            steps(model.optimizer, model.trainable_variables, 3, 4, mine)
            state.restore()  # into the same
            other = hvd.elastic.KerasState(anew)
            if hvd.rank() == 0:
                other.set_saved(saved)
                other.restore()
            other.sync()
        for each in (model, anew):
            steps(each.optimizer, each.trainable_variables, 3, STEPS, mine)
        assert_close(anew.get_weights(), model.get_weights(), 0.0)
        assert_equal_everywhere(anew.get_weights())
        if how == "file":
            assert_close(anew.get_weights(), plain.get_weights())

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_ranks_without_samples_and_ranks_without_a_share(ranks: Any) -> None:
    def check() -> None:
        variable = tf.Variable([1.0, 2.0])  # one rank has all of it
        optimizer = hvd.DistributedOptimizer(from_keras.Adam(0.1, global_clipnorm=1.0), shard=True)
        plain, whole = from_keras.Adam(0.1, global_clipnorm=1.0), tf.Variable([1.0, 2.0])
        for step in range(3):
            has = hvd.rank() == step % hvd.size()
            optimizer.set_batch_weight(4 if has else 0)
            optimizer.apply([tf.constant([3.0, 4.0]) if has else None], [variable])
            plain.apply([tf.constant([3.0, 4.0])], [whole])
        assert_close([variable.numpy()], [whole.numpy()])
        assert int(optimizer.iterations) == 3
        assert_equal_everywhere([variable.numpy()])
        with pytest.raises(ValueError, match="No gradients provided"):
            optimizer.apply([None], [variable])

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_what_the_program_does_to_variables_counts(ranks: Any) -> None:
    """Values that it sets between steps are stepped, and values that it keeps stay as they were."""

    def check() -> None:
        variables, plain = variables_of(), variables_of()
        optimizer, other = hvd.DistributedOptimizer(from_keras.SGD(0.5), shard=True), from_keras.SGD(0.5)

        @tf.function
        def train(given: list[Any]) -> Any:
            before = tf.identity(variables[0].value)
            optimizer.apply(given, variables)
            return before

        kept, expected = [], []
        for step in range(STEPS):
            if step == 2:
                variables[0].assign(variables[0] * 2.0)
                plain[0].assign(plain[0] * 2.0)
            expected.append(np.array(plain[0]))
            kept.append(train(tensors(gradients_of(step, hvd.rank()))))
            other.apply(tensors(mean_of(step, hvd.size())), plain)
        assert_close(values_of(variables), values_of(plain))
        assert_close([each.numpy() for each in kept], expected)  # all six, though memory is used in turn

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_infinite_gradients_of_one_rank_are_skipped_by_all(ranks: Any) -> None:
    def check() -> None:
        variables = variables_of()
        optimizer = hvd.DistributedOptimizer(
            from_keras.LossScaleOptimizer(from_keras.SGD(1.0), initial_scale=8.0), shard=True
        )
        given = gradients_of(0, hvd.rank())
        given[0][0, 0] = np.inf if hvd.rank() == 0 else 0.0
        optimizer.apply(tensors(given), variables)
        assert_close(values_of(variables), START, 0.0)
        assert (int(optimizer.iterations), float(optimizer.dynamic_scale)) == (0, 4.0)

    ranks(check)


@pytest.mark.skipif(UNDER_MPI, reason="pretends to have several hosts, as threads can")
@pytest.mark.parametrize("hosts", [[0, 1], [0, 0, 1]], ids=str)
def test_several_hosts(hosts: list[int]) -> None:
    """Shards travel between hosts; and a rank whose host has more ranks than another one has no shard."""

    def check() -> None:
        variables = variables_of()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam, clipnorm"](), shard=True)
        for step in range(STEPS):
            optimizer.apply(tensors(gradients_of(step, hvd.rank())), variables)
        assert_close(values_of(variables), single("adam, clipnorm", len(hosts)))
        assert_equal_everywhere(values_of(variables))

    on_ranks(len(hosts), check, hosts=hosts)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes(ranks: Any, dtype: str) -> None:
    def check() -> None:
        variables = [keras.Variable(value, dtype=dtype) for value in (*START, np.zeros(3))]
        plain = [keras.Variable(value, dtype=dtype) for value in (*START, np.zeros(3))]
        optimizer, other = hvd.DistributedOptimizer(from_keras.SGD(0.5), shard=True), from_keras.SGD(0.5)
        for step in range(2):
            given = [*gradients_of(0, step), np.ones(3)]  # equal on all ranks, so that their mean is exact
            for each, target in ((optimizer, variables), (other, plain)):
                each.apply([tf.cast(gradient, dtype) for gradient in given], target)
        assert_close([np.array(v, "float64") for v in variables], [np.array(v, "float64") for v in plain], 1e-12)

    ranks(check)


@pytest.mark.ranks(3)
def test_process_sets(ranks: Any) -> None:
    def check() -> None:
        pair = hvd.add_process_set([0, 2])
        if hvd.rank() != 1:
            variables = variables_of()
            optimizer = hvd.DistributedOptimizer(from_keras.Adam(1e-2), process_set=pair, shard=True)
            for step in range(STEPS):
                optimizer.apply(tensors(gradients_of(step, hvd.rank() // 2)), variables)
            assert_close(values_of(variables), single("adam", 2))

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_states_that_differ_are_an_error(ranks: Any, tmp_path: Path) -> None:
    def check() -> None:
        optimizer, variables = hvd.DistributedOptimizer(from_keras.Adam(1e-2), shard=True), variables_of()
        optimizer.build(variables)
        if hvd.rank() == 0:
            optimizer.load_own_variables({str(n): each.numpy() for n, each in enumerate(built().variables)})
        with pytest.raises(MismatchError, match=r"have not loaded the same state.*\n.*loaded 1 times"):
            optimizer.apply(tensors(gradients_of(0, hvd.rank())), variables)

    def built() -> Any:
        plain = from_keras.Adam(1e-2)
        plain.build(variables_of())
        return plain

    ranks(check)


@pytest.mark.ranks(2)
def test_what_cannot_be_sharded(ranks: Any) -> None:
    used = from_keras.SGD(0.1)
    used.build(variables_of())
    multi = (
        from_keras.MultiOptimizer(lambda variable: from_keras.SGD(0.1))
        if hasattr(from_keras, "MultiOptimizer")
        else used
    )

    def check() -> None:
        def refused(optimizer: Any, match: str, **options: Any) -> None:
            with pytest.raises(ArgumentError, match=match):
                hvd.DistributedOptimizer(optimizer, shard=True, **options)

        refused(used, "has been used, or built")
        refused(multi, "MultiOptimizer cannot be sharded|used, or built")
        refused(from_keras.ScheduleFreeAdamW(0.1), "ScheduleFreeAdamW cannot be sharded")
        refused(Together(0.1), "does not step each variable by itself: tried out")
        refused(from_keras.SGD(0.1), "compression=.*shard=True", compression=hvd.Compression.fp16)
        refused(from_keras.SGD(0.1), "op=.*shard=True", op=hvd.Adasum)
        refused(from_keras.SGD(0.1), "local_steps=.*shard=True", local_steps=hvd.LocalSGD(every=2))
        refused(tf.compat.v1.train.GradientDescentOptimizer(0.1), "shard=True is for optimizers of Keras 3")
        variables = variables_of()
        optimizer = hvd.DistributedOptimizer(from_keras.SGD(0.1, use_ema=True), shard=True)
        optimizer.build(variables)
        for act, match in (
            (lambda: optimizer.register_local_var(variables[0]), "register_local_var"),
            (lambda: optimizer.set_weights([]), "set_weights"),
            (lambda: optimizer._model_variables_moving_average, "SwapEMAWeights"),
            (lambda: optimizer.apply(tensors(gradients_of(0, 0)[:1])), "1 gradients for 4 variables"),
        ):
            with pytest.raises(ArgumentError, match=match):
                act()
        rows = tf.IndexedSlices(tf.ones((1, 16)), tf.constant([0]), tf.constant([40, 16]))
        with pytest.raises(UnsupportedTensorError, match="sparse_as_dense=True"):
            optimizer.apply([rows], variables[:1])
        with pytest.raises(ValueError, match="Unknown variable"):
            optimizer.apply([tf.ones(2)], [tf.Variable([1.0, 1.0])])
        with pytest.raises(ArgumentError, match="XLA cannot compile"):
            tf.function(lambda: optimizer.apply(tensors(gradients_of(0, 0)), variables), jit_compile=True)()
        dense = hvd.DistributedOptimizer(from_keras.SGD(1.0), sparse_as_dense=True, shard=True)
        dense.apply([rows], variables[:1])
        assert_close([np.array(variables[0])[0]], [START[0][0] - 1.0])

    ranks(check)


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_what_compile_has_replaced_holds_no_shared_memory(ranks: Any) -> None:
    """Though Keras keeps the graphs of each `compile`, which call it."""

    def check() -> None:
        model = model_of(hvd.DistributedOptimizer(from_keras.SGD(0.1), shard=True))
        fit(model, hvd.rank(), hvd.size())
        before = weakref.ref(model.optimizer._hvdlite.dealt.exchange.sync)
        model.compile(hvd.DistributedOptimizer(from_keras.SGD(0.1), shard=True), "sparse_categorical_crossentropy")
        fit(model, hvd.rank(), hvd.size())
        gc.collect()
        assert before() is None

    ranks(check)


@pytest.mark.ranks(2)
def test_a_rank_that_has_joined_is_an_error(fresh_world: None, ranks: Any) -> None:
    def check() -> None:
        optimizer, variables = hvd.DistributedOptimizer(from_keras.SGD(0.1), shard=True), variables_of()
        optimizer.apply(tensors(gradients_of(0, hvd.rank())), variables)
        if hvd.rank() == 0:
            with pytest.raises(HvdliteError, match="a step needs every rank"):
                optimizer.apply(tensors(gradients_of(1, 0)), variables)
        hvd.join()

    ranks(check)


@pytest.mark.ranks(2)
def test_a_world_with_other_places(ranks: Any) -> None:
    """After shutdown() and init() with the same ranks, training goes on."""

    def check() -> None:
        optimizer, variables = hvd.DistributedOptimizer(from_keras.Adam(1e-2), shard=True), variables_of()
        for step in range(STEPS):
            if step == 3 and UNDER_MPI:
                hvd.shutdown()
                hvd.init()
            optimizer.apply(tensors(gradients_of(step, hvd.rank())), variables)
        assert_close(values_of(variables), single("adam", 2))

    ranks(check)
