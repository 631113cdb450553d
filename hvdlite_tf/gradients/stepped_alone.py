"""Whether an optimizer of Keras steps each variable by itself, so that its variables can be dealt out.

Nobody can see from outside which gradients a step reads, so the optimizer is tried out on small variables.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdlite.protocols import Array
from hvdlite_tf.gradients.copies import copy_for
from hvdlite_tf.gradients.optimizer_parts import shared_of

_STEPS = 5
_SHAPES = ((3, 2), (4,))

ELEMENTWISE = frozenset(
    getattr(keras.optimizers, name)
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD")
    if hasattr(keras.optimizers, name)
)
"""The optimizers that step each element by itself."""

VARIABLEWISE = frozenset(
    getattr(keras.optimizers, name) for name in ("Adafactor", "Lamb", "Muon") if hasattr(keras.optimizers, name)
)
"""The optimizers that step each variable by itself."""


def steps_each_alone(optimizer: Any) -> bool:
    """Return whether an optimizer is known to step each variable by itself. If it clips by a norm over all, that is apart."""
    return optimizer.__class__ in ELEMENTWISE | VARIABLEWISE


def differs_alone(optimizer: Any) -> str:
    """Return a text that says what an optimizer does in another way if it has one variable only; empty if nothing.

    Args:
        optimizer: An optimizer, which is left alone. If it is built, it is also looked at.

    Raises:
        ArgumentError: It cannot be made again from its configuration.
    """
    both, shared = _tried(optimizer, (0, 1))
    for number in (0, 1):
        if not np.array_equal(_tried(optimizer, (number,))[0][number], both[number]):
            return f"tried out on small variables, it changes one of shape {_SHAPES[number]} in another way alone"
    if optimizer.built and shared != [tuple(variable.shape) for variable in shared_of(optimizer)]:
        return "it keeps variables of its own that are not in lists with one for each variable of the model"
    return ""


def _tried(optimizer: Any, chosen: tuple[int, ...]) -> tuple[dict[int, Array], list[tuple[int, ...]]]:
    """Step small variables with an optimizer like this one.

    Args:
        optimizer: The optimizer, which is left alone.
        chosen: The numbers of the variables that are there.

    Returns:
        Their values by their numbers, and the shapes of what the optimizer has for all variables together.
    """
    generator = np.random.default_rng(0)
    numbers = [generator.standard_normal((1 + _STEPS, *shape)).astype(np.float32) for shape in _SHAPES]
    with keras.device("cpu:0"):
        variables = {number: keras.Variable(numbers[number][0], trainable=False) for number in chosen}
        copied = copy_for(optimizer, [], [*variables.values()])
        copied.learning_rate = 0.1
        for step in range(_STEPS):
            # Lengths differ by variable and step, so that a norm over all gradients changes each step.
            scales = {number: 10.0 ** ((step + 2 * number) % 5 - 2) for number in chosen}
            given = [keras.ops.convert_to_tensor(numbers[n][1 + step] * np.float32(scales[n])) for n in chosen]
            copied.apply(given, [*variables.values()])
        shapes = [tuple(variable.shape) for variable in shared_of(copied)]
        return {n: np.array(keras.ops.convert_to_numpy(each)) for n, each in variables.items()}, shapes
