"""`OptimizerState`: what an optimizer of Keras knows besides its settings, divided by the model's variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from hvdlite.protocols import Array
from hvdlite_tf.gradients.optimizer_parts import shared_of, slots_of


class OptimizerState(NamedTuple):
    """The state of an optimizer for some variables of a model.

    Attributes:
        iterations: The number of steps.
        shared: What it has for all variables together.
        slots: For each list of slots, the slots by the numbers of their variables.
    """

    iterations: int
    shared: list[Array]
    slots: dict[str, dict[int, Array]]


def state_of(optimizer: Any, numbers: Sequence[int]) -> OptimizerState:
    """Return copies of a built optimizer's state.

    Args:
        optimizer: The optimizer.
        numbers: The numbers of its first variables. It may have more variables, whose state is left out.
    """
    slots = {
        name: {number: _array(slot) for number, slot in zip(numbers, given, strict=False) if slot is not None}
        for name, given in slots_of(optimizer).items()
    }
    return OptimizerState(int(_array(optimizer._iterations)), [_array(each) for each in shared_of(optimizer)], slots)


def assign_state(optimizer: Any, state: OptimizerState, numbers: Sequence[int]) -> None:
    """Give a built optimizer a state.

    Args:
        optimizer: The optimizer.
        state: A state of these variables, or of more.
        numbers: See `state_of`.
    """
    optimizer._iterations.assign(state.iterations)
    for variable, value in zip(shared_of(optimizer), state.shared, strict=True):
        variable.assign(value)
    for name, given in slots_of(optimizer).items():
        for number, slot in zip(numbers, given, strict=False):
            if slot is not None:
                slot.assign(state.slots[name][number])


def together(states: Sequence[OptimizerState]) -> OptimizerState:
    """Return the state of all variables. The parts have made the same steps."""
    slots: dict[str, dict[int, Array]] = {}
    for state in states:
        for name, given in state.slots.items():
            slots.setdefault(name, {}).update(given)
    return OptimizerState(states[0].iterations, states[0].shared, slots)


def _array(variable: Any) -> Array:
    return np.array(keras.ops.convert_to_numpy(variable))
