"""Keras, with ranks that make steps of their own and meet at times: training is what the formulas say, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from hvdlite.errors import ArgumentError, HvdliteError, MismatchError
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: ranks that are threads share TensorFlow's pool.
    tf.config.threading.set_inter_op_parallelism_threads(8)

pytestmark = pytest.mark.filterwarnings("ignore:.*shuffle=True", "ignore:.*ran out of data")

Ranks = Callable[..., list[Any]]
SHAPES = [(4, 5), (5,), (5, 1), (1,)]
_rng = np.random.default_rng(5)
WEIGHTS = [_rng.standard_normal(shape) for shape in SHAPES]
ROWS, STEPS, EVERY = 6, 7, 3


def outer() -> Any:
    return keras.optimizers.SGD(0.5, momentum=0.75, nesterov=True)


HOWS: dict[str, Callable[[], hvd.LocalSGD]] = {
    "LocalSGD": lambda: hvd.LocalSGD(EVERY),
    "DiLoCo": lambda: hvd.DiLoCo(EVERY, outer()),
}


def make_model(dtype: str = "float64") -> Any:
    layers = [keras.layers.Dense(5, activation="tanh", dtype=dtype), keras.layers.Dense(1, dtype=dtype)]
    model = keras.Sequential([keras.layers.Input((4,), dtype=dtype), *layers])
    model.set_weights(WEIGHTS)
    return model


def adam(**options: Any) -> Any:
    return keras.optimizers.Adam(0.02, **options)


def batch(step: int, rank: int, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng([step, rank]).standard_normal((ROWS, 4))
    return x.astype(dtype), np.sin(x.sum(1, keepdims=True)).astype(dtype)


def trainer(model: Any, optimizer: Any, graph: bool) -> Callable[..., None]:
    def step(x: Any, y: Any, factor: Any = 1.0) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean((model(x) - y) ** 2) * tf.cast(factor, y.dtype))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return tf.function(step, reduce_retracing=True) if graph else step


def flat(model: Any) -> np.ndarray:
    return np.concatenate([weight.reshape(-1) for weight in model.get_weights()])


def is_same_everywhere(model: Any) -> bool:
    everybody = hvd.allgather_object(flat(model).tobytes())
    return all(each == everybody[0] for each in everybody)


class InOneProcess:
    """The models of all ranks, each with an optimizer of Keras, and the formulas by which they are brought together."""

    def __init__(
        self, size: int, how: hvd.LocalSGD, optimizer: Callable[[], Any] = adam, dtype: str = "float64"
    ) -> None:
        self.models = [make_model(dtype) for _ in range(size)]
        self.optimizers = [optimizer() for _ in range(size)]
        self.steps = [trainer(m, o, graph=False) for m, o in zip(self.models, self.optimizers, strict=True)]
        self.is_outer, self.start = isinstance(how, hvd.DiLoCo), self.models[0].get_weights()
        self.velocity = [np.zeros_like(weight) for weight in self.start]
        self.dtype = dtype

    def step(self, rank: int, number: int, **more: Any) -> None:
        self.steps[rank](*map(tf.constant, batch(number, rank, self.dtype)), **more)

    def meet(self, samples: Sequence[float]) -> None:
        """Bring the models of the ranks that have samples together."""
        shares = [weight / sum(samples) for weight in samples]
        everybody = [model.get_weights() for model in self.models]
        mean = [sum(s * w for s, w in zip(shares, each, strict=True)) for each in zip(*everybody, strict=True)]
        if self.is_outer:
            gradients = [before - after for before, after in zip(self.start, mean, strict=True)]
            self.velocity = [0.75 * v - 0.5 * g for v, g in zip(self.velocity, gradients, strict=True)]
            moves = [0.75 * v - 0.5 * g for v, g in zip(self.velocity, gradients, strict=True)]
            mean = self.start = [s + move for s, move in zip(self.start, moves, strict=True)]
        for model, weight in zip(self.models, samples, strict=True):
            if weight:
                model.set_weights(mean)

    def follow(self, furthest: int) -> None:
        """Give all ranks the model and the optimizer state of one rank."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            model.set_weights(self.models[furthest].get_weights())
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
            for mine, other in zip(optimizer.variables, self.optimizers[furthest].variables, strict=True):
                mine.assign(other)


@pytest.mark.parametrize(("kind", "graph"), [("LocalSGD", True), ("DiLoCo", False)], ids=["function", "eager"])
def test_a_loop_is_what_the_formula_says(ranks: Ranks, kind: str, graph: bool) -> None:
    def check() -> None:
        how, rank, size = HOWS[kind], hvd.rank(), hvd.size()
        samples = [1.0 + r if graph else 1.0 for r in range(size)]
        model, truth = make_model(), InOneProcess(size, how())
        optimizer = hvd.DistributedOptimizer(adam(), local_steps=how())
        if graph:
            optimizer.set_batch_weight(samples[rank])
        step = trainer(model, optimizer, graph)
        for number in range(STEPS):
            step(*map(tf.constant, batch(number, rank)))
            for r in range(size):
                truth.step(r, number)
            if (number + 1) % EVERY == 0:
                truth.meet(samples)
            np.testing.assert_allclose(flat(model), flat(truth.models[rank]), atol=1e-12)
        for _ in range(2):  # the second time there is nothing to do
            optimizer.average_parameters()
        truth.meet(samples)
        np.testing.assert_allclose(flat(model), flat(truth.models[rank]), atol=1e-12)
        assert is_same_everywhere(model)

    ranks(check)


@pytest.mark.costly
@pytest.mark.ranks(at_least=2)
@pytest.mark.parametrize(("kind", "even"), [("DiLoCo", False), ("LocalSGD", False), ("DiLoCo", True)])
def test_fit(ranks: Ranks, kind: str, even: bool) -> None:
    """The end of each epoch is a meeting, before validation. Ranks with less data, and none, follow the furthest one."""

    def check() -> None:
        how, rank, size = HOWS[kind], hvd.rank(), hvd.size()
        counts = [4 if even else 2 * r for r in range(size)]
        model, truth = make_model("float32"), InOneProcess(size, how(), dtype="float32")
        model.compile(hvd.DistributedOptimizer(adam(), local_steps=how()), loss="mse")
        parts = [batch(number, rank, "float32") for number in range(counts[rank])]
        x, y = (
            np.concatenate([*(part[place] for part in parts), np.zeros((0, columns), "float32")])
            for place, columns in ((0, 4), (1, 1))
        )
        data, validation = tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS), batch(99, 0, "float32")
        callbacks = [hvd.callbacks.Distributed()]
        history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks, validation_data=validation).history
        losses = []
        for _ in range(2):
            done = [0] * size
            while any(before < count for before, count in zip(done, counts, strict=True)):
                now = [min(count, before + EVERY) for before, count in zip(done, counts, strict=True)]
                for r in range(size):
                    for number in range(done[r], now[r]):
                        truth.step(r, number)
                truth.meet([float(after - before) for before, after in zip(done, now, strict=True)])
                done = now
            if not even:
                truth.follow(size - 1)
            losses.append(float(np.mean((truth.models[rank](validation[0]) - validation[1]) ** 2)))
        np.testing.assert_allclose(flat(model), flat(truth.models[rank]), atol=1e-5)
        np.testing.assert_allclose(history["val_loss"], losses, rtol=1e-4)
        assert is_same_everywhere(model)

    ranks(check)


@pytest.mark.slow
@pytest.mark.ranks(at_least=2)
def test_accumulated_gradients(ranks: Ranks) -> None:
    """A step is an update, of two passes."""

    def check() -> None:
        how = HOWS["LocalSGD"]
        rank, size = hvd.rank(), hvd.size()
        model, truth = make_model(), InOneProcess(size, how(), lambda: adam(gradient_accumulation_steps=2))
        optimizer = hvd.DistributedOptimizer(adam(gradient_accumulation_steps=2), local_steps=how())
        step = trainer(model, optimizer, graph=True)
        for number in range(2 * EVERY + 2):
            step(*map(tf.constant, batch(number, rank)))
            for r in range(size):
                truth.step(r, number)
            if number + 1 == 2 * EVERY:
                truth.meet([1.0] * size)
        np.testing.assert_allclose(flat(model), flat(truth.models[rank]), atol=1e-12)

    ranks(check)


@pytest.mark.slow
@pytest.mark.ranks(at_least=2)
def test_scaled_losses(ranks: Ranks) -> None:
    """Each rank has a scale of its own, and skips the steps in which its own gradients overflow."""

    def scaled(plain: Any = None) -> Any:
        return keras.optimizers.LossScaleOptimizer(plain or adam(), initial_scale=2.0**10, dynamic_growth_steps=2)

    def check() -> None:
        how, rank, size = HOWS["DiLoCo"], hvd.rank(), hvd.size()
        model, truth = make_model("float32"), InOneProcess(size, how(), scaled, "float32")
        optimizer = scaled(hvd.DistributedOptimizer(adam(), local_steps=how()))  # Keras turns them inside out
        step = trainer(model, optimizer, graph=True)

        def factor(number: int, of: int) -> Any:
            return tf.constant(np.inf if number == 1 and of == size - 1 else 1.0)

        for number in range(EVERY + 1):
            step(*map(tf.constant, batch(number, rank, "float32")), factor(number, rank))
            for r in range(size):
                truth.step(r, number, factor=factor(number, r))
            if number + 1 == EVERY:
                truth.meet([1.0] * size)
        np.testing.assert_allclose(flat(model), flat(truth.models[rank]), atol=1e-5)
        assert optimizer.dynamic_scale.numpy() == truth.optimizers[rank].dynamic_scale.numpy()

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_training_goes_on_from_a_state(ranks: Ranks) -> None:
    def check() -> None:
        how = HOWS["DiLoCo"]
        models, optimizers = [make_model(), make_model()], []
        for place, model in enumerate(models):
            optimizers.append(hvd.DistributedOptimizer(adam(), local_steps=how()))
            optimizers[place].build(model.trainable_variables)
        step = trainer(models[0], optimizers[0], graph=False)
        for number in range(EVERY + 2):
            step(*map(tf.constant, batch(number, hvd.rank())))
        models[1].set_weights(models[0].get_weights())
        for mine, other in zip(optimizers[1].variables, optimizers[0].variables, strict=True):
            mine.assign(other)
        optimizers[1].load_exchange_state(optimizers[0].exchange_state())
        again = trainer(models[1], optimizers[1], graph=True)
        for number in range(EVERY + 2, 2 * EVERY + 1):
            for each in (step, again):
                each(*map(tf.constant, batch(number, hvd.rank())))
        np.testing.assert_allclose(flat(models[0]), flat(models[1]), atol=1e-14)
        with pytest.raises(
            ArgumentError, match=r"this state has \['aggregator'\], and this optimizer \['local_steps'\]"
        ):
            optimizers[0].load_exchange_state({"aggregator": {}})

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_a_loop_with_uneven_data(ranks: Ranks) -> None:
    """A rank that is done averages and joins. Its steps count in the next meeting of the others."""

    def check() -> None:
        how, rank, size = HOWS["DiLoCo"], hvd.rank(), hvd.size()
        model, truth = make_model(), InOneProcess(size, how())
        optimizer = hvd.DistributedOptimizer(adam(), local_steps=how())
        step = trainer(model, optimizer, graph=True)
        counts = [1 + 2 * r for r in range(size)]
        for number in range(counts[rank]):
            step(*map(tf.constant, batch(number, rank)))
        optimizer.average_parameters()
        assert hvd.join().numpy() == size - 1
        for begin in range(0, max(counts), EVERY):
            made = [len(range(begin, min(begin + EVERY, count))) for count in counts]
            for r in range(size):
                for number in range(begin, begin + made[r]):
                    truth.step(r, number)
            truth.meet(list(map(float, made)))
        truth.follow(size - 1)
        np.testing.assert_allclose(flat(model), flat(truth.models[rank]), atol=1e-12)
        step(*map(tf.constant, batch(50, 0)))
        truth.step(0, 50)  # all ranks have the same optimizer state
        np.testing.assert_allclose(flat(model), flat(truth.models[0]), atol=1e-12)
        optimizer.average_parameters()

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_outer_gradients_that_are_compressed(ranks: Ranks) -> None:
    def check() -> None:
        model, truth = make_model(), InOneProcess(hvd.size(), HOWS["DiLoCo"]())
        optimizer = hvd.DistributedOptimizer(adam(), local_steps=HOWS["DiLoCo"](), compression=hvd.Compression.fp16)
        step = trainer(model, optimizer, graph=False)
        for number in range(EVERY):
            step(*map(tf.constant, batch(number, hvd.rank())))
            for r in range(hvd.size()):
                truth.step(r, number)
        truth.meet([1.0] * hvd.size())
        away = np.abs(flat(model) - flat(truth.models[0])).max()
        assert 0 < away < 1e-4  # half a unit in the eleventh bit of 0.06
        assert is_same_everywhere(model)

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_ranks_that_do_not_fit_together(ranks: Ranks) -> None:
    def check() -> None:
        model = make_model()
        model.layers[0].bias.assign(model.layers[0].bias + hvd.rank())
        step = trainer(model, hvd.DistributedOptimizer(adam(), local_steps=hvd.DiLoCo(1)), graph=False)
        with pytest.raises(MismatchError, match=r"different parameters.*hvd.callbacks.Distributed\(\) in Keras"):
            step(*map(tf.constant, batch(0, hvd.rank())))
        optimizer = hvd.DistributedOptimizer(adam(), local_steps=hvd.LocalSGD(1))
        if hvd.rank() == 0:
            optimizer.set_batch_weight(5)
        with pytest.raises(MismatchError, match=r"1 of \d ranks have set batch weights"):
            trainer(make_model(), optimizer, graph=False)(*map(tf.constant, batch(0, hvd.rank())))
        optimizer = hvd.DistributedOptimizer(adam(), local_steps=hvd.LocalSGD(1))
        optimizer.set_batch_weight(0)
        with pytest.raises(HvdliteError, match="the batch weights of all ranks are 0"):
            trainer(make_model(), optimizer, graph=False)(*map(tf.constant, batch(0, hvd.rank())))
        with pytest.raises(MismatchError, match=r"(?s)rank 0: local_steps=LocalSGD\(every=1\).*LocalSGD\(every=2\)"):
            hvd.DistributedOptimizer(adam(), local_steps=hvd.LocalSGD(1 + min(1, hvd.rank())))

    ranks(check)


def test_what_does_not_go_together(ranks: Ranks) -> None:
    def check() -> None:
        used, local = adam(), hvd.LocalSGD()
        used.build(make_model().trainable_variables)
        for options, message in (
            ({"local_steps": 8}, r"local_steps=8: expected hvd.LocalSGD\(every=8\) or hvd.DiLoCo"),
            ({"local_steps": local, "op": hvd.Sum}, r"op=.* and local_steps=LocalSGD\(every=8\) do not go together"),
            ({"local_steps": local, "compression": hvd.Compression.topk(0.1)}, "aggregator='topk.* and local_steps"),
            ({"local_steps": local, "compression": hvd.Compression.fp16}, "parameters would be rounded. DiLoCo can"),
            (
                {"local_steps": hvd.DiLoCo(outer=lambda each: each)},
                "DiLoCo: outer=function: expected a new optimizer of Keras",
            ),
            ({"local_steps": hvd.DiLoCo(outer=used)}, "DiLoCo: outer=a distributed or used one"),
        ):
            with pytest.raises(ArgumentError, match=message):
                hvd.DistributedOptimizer(adam(), **options)
        with pytest.raises(
            ArgumentError, match="is for optimizers of Keras 3; got tensorflow.*GradientDescentOptimizer"
        ):
            hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), local_steps=local)
        with pytest.raises(ArgumentError, match="for optimizers that are made with local_steps="):
            hvd.DistributedOptimizer(adam()).average_parameters()

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_a_second_fit_leaves_each_rank_its_own_state(ranks: Ranks) -> None:
    """The callback gives all ranks the weights of one, and not what each has come to by its own steps."""

    def check() -> None:
        model = make_model()
        model.compile(hvd.DistributedOptimizer(adam(), local_steps=hvd.LocalSGD(EVERY)), "mse", run_eagerly=True)
        seen: list[list[np.ndarray]] = []

        class Look(keras.callbacks.Callback):  # type: ignore[misc]
            def look(self, logs: Any = None) -> None:
                seen.append([each.numpy() for each in model.optimizer.variables])

            on_train_begin = on_train_end = look

        callbacks = [hvd.callbacks.Distributed(), Look()]
        for _ in range(2):
            model.fit(*batch(0, hvd.rank()), batch_size=ROWS, epochs=2, verbose=0, callbacks=callbacks)
        for before, after in zip(seen[1], seen[2], strict=True):
            np.testing.assert_array_equal(before, after)
        moments = [each[2] for each in hvd.allgather_object(seen[1])]
        assert not np.array_equal(moments[0], moments[1])

    ranks(check)


@pytest.mark.costly
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "settings",
    [{"gradient_accumulation_steps": 2}, {"use_ema": True, "ema_overwrite_frequency": 2, "ema_momentum": 0.6}],
)
def test_linear_steps_of_several_epochs_are_those_of_one_process(ranks: Ranks, settings: dict[str, Any]) -> None:
    """An epoch may end between two passes of an update; moving averages of the ranks become one."""
    x, y = (_rng.standard_normal((18, width)) for width in (4, 1))

    def check() -> None:
        plain, ours = make_model(), make_model()
        own = np.arange(18).reshape(3, 2, 3)[:, hvd.rank()].reshape(-1)
        for model, rows, options in ((plain, slice(None), None), (ours, own, {"local_steps": hvd.LocalSGD(every=1)})):
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **settings)
            callbacks = [] if options is None else [hvd.callbacks.Distributed()]
            model.compile(
                optimizer if options is None else hvd.DistributedOptimizer(optimizer, **options),
                "mse",
                run_eagerly=True,
            )
            for epochs in (2, 1):
                size = 6 if options is None else 3
                model.fit(x[rows], y[rows], size, epochs, verbose=0, shuffle=False, callbacks=callbacks)
        for one, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)

    ranks(check)
