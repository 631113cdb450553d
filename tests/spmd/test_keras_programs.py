"""Keras' optimizers and callbacks, and what programs do with them, against one process on the joined batch.

Cases are drawn by a seed, which is printed with their number: ``HVDLITE_TEST_SEED=7 HVDLITE_TEST_CASES=500 pytest -s …`` draws
others, and more.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite_tf as hvd
from tests.conftest import UNDER_MPI

if not UNDER_MPI:
    # As in test_keras_training.py: ranks that are threads share TensorFlow's pool.
    tf.config.threading.set_inter_op_parallelism_threads(8)

SEED = int(os.environ.get("HVDLITE_TEST_SEED", "1"))
CASES = int(os.environ.get("HVDLITE_TEST_CASES", "15"))
ROWS, STEPS = 12, 4

_rng = np.random.default_rng(2)
X = _rng.standard_normal((STEPS, ROWS, 3))
Y = _rng.standard_normal((STEPS, ROWS, 2))
TOKENS = _rng.integers(0, 4, (STEPS, ROWS))  # so that rows come more than once
START = [_rng.standard_normal(shape) * 0.4 for shape in [(3, 4), (4,), (4, 2), (2,), (4, 2)]]

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda **k: keras.optimizers.SGD(k.pop("rate", 0.1), **k),
    "momentum": lambda **k: keras.optimizers.SGD(k.pop("rate", 0.1), momentum=0.9, nesterov=True, **k),
    "RMSprop": lambda **k: keras.optimizers.RMSprop(k.pop("rate", 0.01), momentum=0.5, centered=True, **k),
    "Adam": lambda **k: keras.optimizers.Adam(k.pop("rate", 0.01), amsgrad=True, **k),
    "AdamW": lambda **k: keras.optimizers.AdamW(k.pop("rate", 0.01), **k),
    "Adamax": lambda **k: keras.optimizers.Adamax(k.pop("rate", 0.01), **k),
    "Nadam": lambda **k: keras.optimizers.Nadam(k.pop("rate", 0.01), **k),
    "Adagrad": lambda **k: keras.optimizers.Adagrad(k.pop("rate", 0.1), **k),
    "Adadelta": lambda **k: keras.optimizers.Adadelta(k.pop("rate", 1.0), **k),
    "Adafactor": lambda **k: keras.optimizers.Adafactor(k.pop("rate", 0.01), **k),
    "Ftrl": lambda **k: keras.optimizers.Ftrl(k.pop("rate", 0.1), l1_regularization_strength=0.001, **k),
    "Lion": lambda **k: keras.optimizers.Lion(k.pop("rate", 0.01), **k),
    "Lamb": lambda **k: keras.optimizers.Lamb(k.pop("rate", 0.01), **k),
    "LossScaleOptimizer": lambda **k: keras.optimizers.LossScaleOptimizer(OPTIMIZERS["Adam"](**k), initial_scale=8.0),
    "MultiOptimizer": lambda **k: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(OPTIMIZERS["SGD"](**k), {".*second.*": keras.optimizers.Adam(0.01)})
    ),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.02},
    "weight_decay": {"weight_decay": 0.1},
    "moving average": {"use_ema": True, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "schedule": {"rate": keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.5)},
}
PROGRAMS = [
    "",
    "in a function",
    "a variable has no gradient",
    "some variables only, from the third step on",
    "another learning rate in the third step",
    "weights are set before the third step",
    "another optimizer takes the state over",
    "NaN in the third batch",
    "infinity in the third batch",
    "an embedding",
]


@dataclass(frozen=True)
class Case:
    optimizer: str
    setting: str
    program: str
    wide: bool
    """float64. Some optimizers take signs and roots of what is nearly 0, which rounding changes."""


def draw(seed: int, count: int) -> list[Case]:
    """Each optimizer, setting and program comes as often as any other."""
    dice = random.Random(seed)
    decks: list[list[str]] = [[], [], []]
    found: list[Case] = []
    while len(found) < count:
        for deck, names in zip(decks, (OPTIMIZERS, SETTINGS, PROGRAMS), strict=True):
            if not deck:
                deck += dice.sample(list(names), len(names))
        optimizer, setting, program = (deck.pop() for deck in decks)
        wide = optimizer in ("Lion", "Adadelta", "Ftrl", "Lamb", "Nadam", "Adamax") or dice.random() < 0.5
        if setting == "schedule" and "learning rate" in program:
            setting = ""  # Keras refuses to set it
        if optimizer == "MultiOptimizer" and ("some variables" in program or "learning rate" in program):
            program = ""  # as above
        found.append(Case(optimizer, setting, program, wide))
    return found


class Training:
    """A small model, and an optimizer, in a loop of a program's own."""

    def __init__(self, case: Case, wrap: Callable[[Any], Any]) -> None:
        self.case, self.wrap = case, wrap
        dtype = "float64" if case.wide else "float32"
        names = ("first", "first_bias", "second", "second_bias", "table")
        self.variables = [
            keras.Variable(value, dtype=dtype, name=name) for value, name in zip(START, names, strict=True)
        ]
        self.trained = self.variables if case.program == "an embedding" else self.variables[:4]
        self.optimizer = wrap(self.make())

    def make(self) -> Any:
        return OPTIMIZERS[self.case.optimizer](**SETTINGS[self.case.setting])

    def loss(self, x: Any, y: Any, tokens: Any) -> Any:
        first, bias, second, other, table = (variable.value for variable in self.variables)
        hidden = tf.tanh(x @ first + (0 if "no gradient" in self.case.program else bias))
        out = hidden @ second + other
        if self.case.program == "an embedding":
            out += tf.gather(table, tokens)
        return tf.reduce_mean((out - y) ** 2)

    def step(self, x: Any, y: Any, tokens: Any, trained: Any) -> None:
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(self.loss(x, y, tokens))
        gradients = tape.gradient(loss, [variable.value for variable in trained])
        self.optimizer.apply_gradients(list(zip(gradients, trained, strict=True)))

    def run(self, rank: int, size: int) -> list[np.ndarray]:
        program, dtype = self.case.program, self.variables[0].dtype
        own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
        step = lambda *data: self.step(*data, self.trained)  # noqa: E731  # Keras' variables as arguments become tensors
        step = tf.function(step, autograph=False) if program == "in a function" else step
        for number in range(STEPS):
            x = X[number].copy()
            if number == 2:
                x[-1] = np.nan if "NaN" in program else np.inf if "infinity" in program else x[-1]
                self.before_the_third_step()
            if number >= 2 and "some variables" in program:
                self.trained = self.variables[2:4]
            data = tf.constant(x[own], dtype), tf.constant(Y[number][own], dtype), tf.constant(TOKENS[number][own])
            step(*data)
        rest = [v for v in self.optimizer.variables if v.dtype in ("float32", "float64")]
        return [variable.numpy() for variable in [*self.variables, *rest]]

    def before_the_third_step(self) -> None:
        program = self.case.program
        if "learning rate" in program:
            getattr(self.optimizer, "inner_optimizer", self.optimizer).learning_rate = 0.003
        elif "weights are set" in program:
            self.variables[0].assign(self.variables[0].value * 0.5)
        elif "another optimizer" in program:
            other = self.wrap(self.make())
            other.build(self.trained)
            for new, old in zip(other.variables, self.optimizer.variables, strict=True):
                new.assign(old)
            self.optimizer = other


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.slow
def test_loops(ranks: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cases = draw(SEED, CASES)
    truths = [Training(case, lambda optimizer: optimizer).run(0, 1) for case in cases]

    def check() -> int:
        wrong = []
        for case, truth in zip(cases, truths, strict=True):
            found = Training(case, hvd.DistributedOptimizer).run(hvd.rank(), hvd.size())
            tolerance = 1e-8 if case.wide else 2e-4
            if not all(
                np.allclose(a, b, rtol=tolerance, atol=tolerance * 1e-2, equal_nan=True)
                for a, b in zip(found, truth, strict=True)
            ):
                worst = max(float(np.nanmax(np.abs(a - b))) for a, b in zip(found, truth, strict=True) if a.size)
                wrong.append((case, worst))
        assert wrong == [], f"seed {SEED}: {len(wrong)} of {len(cases)} cases differ from one process: {wrong}"
        return hvd.size()

    sizes = ranks(check)
    with capsys.disabled():
        print(f" [seed {SEED}: {len(cases)} loops on {len(sizes)} ranks equal one process]", end="")


# fit


class Recorder(keras.callbacks.Callback):  # type: ignore[misc]  # mypy does not see Keras
    """The learning rate of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate))


def deciding() -> list[Any]:
    """Keras' callbacks that decide by metrics, or set the learning rate."""
    return [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch)),
        keras.callbacks.ReduceLROnPlateau("loss", min_delta=10.0, patience=1, factor=0.5),
        keras.callbacks.EarlyStopping("val_loss", min_delta=10.0, patience=2, restore_best_weights=True),
    ]


def train(wrap: Callable[[Any], Any], first: list[Any], rank: int, size: int) -> Any:
    """A model, its history and the rates of its steps: compiled, fitted twice with one list of callbacks and, between, half
    frozen and compiled with another optimizer."""
    layers = [keras.layers.Dense(4, "tanh", name=f"hidden_{rank}"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.layers.Input((3,)), *layers])
    model.set_weights(START[:4])
    own = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    x, y = (np.concatenate([each[own] for each in data]).astype("float32") for data in (X[:3], Y[:3]))
    recorder = Recorder()
    callbacks = [*first, *deciding(), recorder]
    history = []
    for optimizer in (keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.Adam(0.05)):
        model.compile(wrap(optimizer), "mse", metrics=["mae"], run_eagerly=True)
        seen = model.fit(
            *(x, y),
            batch_size=ROWS // size,
            epochs=4,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
            validation_data=(X[3][own], Y[3][own]),
        )
        history.append({key: values for key, values in seen.history.items() if key != "lr"})
        layers[0].trainable = False
    return model.get_weights(), history, recorder.rates


@pytest.mark.ranks(2)
def test_fit(ranks: Any) -> None:
    weights, history, rates = train(lambda optimizer: optimizer, [], 0, 1)

    def check() -> None:
        got = train(hvd.DistributedOptimizer, [hvd.callbacks.Distributed()], hvd.rank(), hvd.size())
        assert got[2] == pytest.approx(rates, rel=1e-5)
        for one, other in zip(got[1], history, strict=True):
            assert sorted(one) == sorted(other)
            assert all(one[key] == pytest.approx(other[key], rel=1e-4) for key in one)
        for mine, truth in zip(got[0], weights, strict=True):
            assert mine == pytest.approx(truth, rel=1e-3, abs=1e-5)

    ranks(check)
