"""Optimizers and tapes that were made before shutdown() work after the next init().

The results must be those of training in one process on the joined batch. Each case makes a function that trains one step on
some rows of a batch and returns the weights. The function trains two steps in each of three worlds of both ranks, one world
after the other. With KERAS_BACKEND=torch, only the cases without TensorFlow run.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np

import hvdlite_tf as hvd

ON_TORCH = keras.backend.backend() == "torch"
if not ON_TORCH:
    import tensorflow as tf

WORLDS, STEPS, ROWS = 3, 2, 8
rng = np.random.default_rng(3)
X = rng.standard_normal((WORLDS * STEPS, ROWS, 4)).astype("float32")
Y = rng.standard_normal((WORLDS * STEPS, ROWS, 1)).astype("float32")
WORDS = rng.integers(0, 6, (WORLDS * STEPS, ROWS, 1))
START = [rng.standard_normal(shape).astype("float32") for shape in [(4, 3), (3,), (3, 1), (1,)]]


Step = Callable[[int, slice], Any]
"""Trains one step with these rows of a batch, by its number, and returns the weights."""
Make = Callable[[bool], Step]
"""Makes a step, on one process, or distributed."""


def flat(values: Iterable[Any]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.asarray(keras.ops.convert_to_numpy(value)).reshape(-1) for value in values])


def fitted(
    optimizer: Callable[[], Any],
    callbacks: Callable[[], list[Any]] = list,
    options: Callable[[], dict[str, Any]] = dict,
) -> Make:
    def make(distributed: bool) -> Step:
        model = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
        )
        model.set_weights(START)
        plain = optimizer()
        model.compile(optimizer=hvd.DistributedOptimizer(plain, **options()) if distributed else plain, loss="mse")

        def step(number: int, rows: slice) -> Any:
            x, y = X[number, rows], Y[number, rows]
            model.fit(x, y, batch_size=len(x), verbose=0, callbacks=callbacks() if distributed else None)
            return model.weights

        return step

    return make


def applied(traced: bool, passes: int = 1) -> Make:
    """A custom loop that calls an optimizer's apply()."""

    def make(distributed: bool) -> Step:
        kernel, bias = tf.Variable(START[0]), tf.Variable(START[1])
        optimizer = keras.optimizers.SGD(
            0.1, momentum=0.9, gradient_accumulation_steps=None if distributed or passes == 1 else passes
        )
        if distributed:
            optimizer = hvd.DistributedOptimizer(
                optimizer, backward_passes_per_step=passes, average_aggregated_gradients=True
            )
        optimizer.build([kernel, bias])

        def train(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ kernel + bias))
            optimizer.apply(tape.gradient(loss, [kernel, bias]), [kernel, bias])

        train = tf.function(train) if traced else train

        def step(number: int, rows: slice) -> Any:
            train(tf.constant(X[number, rows]))
            return [kernel, bias]

        return step

    return make


def taped(traced: bool) -> Make:
    """A custom loop with a gradient tape, for a table with sparse gradients and a dense layer.

    Only rank 0 has a gradient of the bias of the dense layer.
    """

    def make(distributed: bool) -> Step:
        table, kernel, bias = tf.Variable(np.ones((6, 4), "float32")), tf.Variable(START[0]), tf.Variable(START[1])
        sources = [table, kernel, bias]

        def train(x: Any, words: Any) -> None:
            with tf.GradientTape() as tape:
                seen = x + tf.gather(table, words[:, 0])
                has_bias = not distributed or hvd.rank() == 0
                loss = tf.reduce_mean(tf.square(seen @ kernel)) + (tf.reduce_mean(bias**2) * 2 if has_bias else 0)
            if distributed:
                tape = hvd.DistributedGradientTape(tape)
            for source, gradient in zip(sources, tape.gradient(loss, sources), strict=True):
                # Only one of two ranks has the term with the bias, so the mean over the ranks is half of that term.
                share = 0.5 if source is bias and not distributed else 1.0
                source.assign_sub(tf.convert_to_tensor(gradient) * 0.1 * share)

        train = tf.function(train) if traced else train

        def step(number: int, rows: slice) -> Any:
            train(tf.constant(X[number, rows]), tf.constant(WORDS[number, rows]))
            return sources

        return step

    return make


def legacy(passes: int) -> Make:
    """An optimizer of tf_keras in a tf.function."""
    import tf_keras

    def make(distributed: bool) -> Step:
        kernel = tf.Variable(START[0])
        optimizer = tf_keras.optimizers.SGD(0.1)
        if distributed:
            optimizer = hvd.DistributedOptimizer(
                optimizer, backward_passes_per_step=passes, average_aggregated_gradients=True
            )

        @tf.function  # type: ignore[untyped-decorator]  # mypy does not see TensorFlow
        def train(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ kernel))
            optimizer.apply_gradients([(tape.gradient(loss, kernel), kernel)])

        def step(number: int, rows: slice) -> Any:
            if distributed or passes == 1:
                train(tf.constant(X[number, rows]))
            elif number % passes == passes - 1:  # one step with the rows of all passes
                train(tf.constant(X[number - passes + 1 : number + 1, rows].reshape(-1, 4)))
            return [kernel]

        return step

    return make


def arrays() -> Make:
    """A training loop with NumPy alone."""

    def make(distributed: bool) -> Step:
        weights = {"kernel": START[0].copy(), "bias": START[1].copy()}
        combine: Callable[..., Any] = hvd.DistributedGradient() if distributed else lambda gradients, weight: gradients

        def step(number: int, rows: slice) -> Any:
            x = X[number, rows]
            error = (x @ weights["kernel"] + weights["bias"]) * 2 / (3 * len(x))
            gradients = combine({"kernel": x.T @ error, "bias": error.sum(0)}, weight=len(x))
            for name, gradient in gradients.items():
                weights[name] -= 0.1 * gradient
            return list(weights.values())

        return step

    return make


CASES = {
    "arrays": arrays(),
    "fit": fitted(lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
    "fit with callbacks": fitted(lambda: keras.optimizers.Adam(0.01), lambda: [hvd.callbacks.Distributed()]),
    "fit accumulating": fitted(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
    "fit with an aggregator": fitted(
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        options=lambda: {"compression": hvd.Compression.topk(1.0, smallest=0)},  # all elements
    ),
    "fit with local steps": fitted(
        lambda: keras.optimizers.SGD(0.1),
        lambda: [hvd.callbacks.Distributed()],
        lambda: {"local_steps": hvd.LocalSGD(every=1)},
    ),
}
if not ON_TORCH:
    CASES |= {
        "apply": applied(traced=False),
        "traced apply": applied(traced=True),
        "traced apply, two passes": applied(traced=True, passes=2),
        "tape": taped(traced=False),
        "traced tape": taped(traced=True),
        "tf_keras": legacy(passes=1),
        "tf_keras, two passes": legacy(passes=2),
    }

everything = slice(0, ROWS)
expected = {
    name: [flat(step(number, everything)) for number in range(WORLDS * STEPS)]
    for name, step in ((name, make(False)) for name, make in CASES.items())
}

hvd.init()
mine = slice(hvd.rank() * ROWS // 2, (hvd.rank() + 1) * ROWS // 2)
steps = {name: make(True) for name, make in CASES.items()}
worst = dict.fromkeys(CASES, 0.0)
for start in range(0, WORLDS * STEPS, STEPS):
    if start:
        hvd.shutdown()
        hvd.init()
    for name, step in steps.items():
        for number in range(start, start + STEPS):
            found = flat(step(number, mine))
            worst[name] = max(worst[name], float(np.abs(found - expected[name][number]).max()))
for name, deviation in worst.items():
    told = hvd.allgather_object(deviation)
    if hvd.rank() == 0:
        print(f"{name}: {max(told):.1e}")

if not ON_TORCH:
    # A world of another size: a function traced on two ranks runs on one. A function traced on one rank fails on two.
    rank = hvd.rank()
    hvd.shutdown()
    hvd.init(comm=[rank])
    for name in ("traced apply", "traced tape"):
        steps[name](0, everything)
    traced_alone = applied(traced=True)(True)
    traced_alone(0, everything)
    hvd.shutdown()
    hvd.init()
    try:
        traced_alone(1, everything)  # the shape is the same, so the function is not traced again
        print("no error")
    except tf.errors.UnknownError as error:
        if hvd.rank() == 0:
            print("alone:", "traced in a job of one rank" in str(error))
