"""`KerasPart`: the variables of one server, with an optimizer of the class that the program has chosen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdlite.async_sgd.compensation import DelayCompensation
from hvdlite.async_sgd.deal import ServerLayout
from hvdlite.async_sgd.part import Push
from hvdlite.protocols import Array
from hvdlite_tf.async_sgd.served import Served
from hvdlite_tf.async_sgd.state import OptimizerState, assign_state, state_of
from hvdlite_tf.gradients.copies import copy_for, variable_like


class KerasPart:
    """A `hvdlite.async_sgd.training.replica.StatefulPart` of Keras.

    Args:
        optimizer: The program's optimizer, which is built. The part has another one like it, with the same state.
        served: What the servers hold, with the present values of this rank.
        layout: Which of them are of this part. One part also has the number of steps.
        compensation: What to do about old gradients. What it keeps is not saved.
    """

    def __init__(self, optimizer: Any, served: Served, layout: ServerLayout, compensation: DelayCompensation) -> None:
        self._served, self._layout, self._compensation = served, layout, compensation
        self._kept: dict[int, Array] = {}
        self._numbers = [number for number in layout.tensors if number != served.counter]  # which has the last place
        originals = [served.variables[number] for number in self._numbers]
        self._own = [variable_like(served.variables[number], served.read(number).copy()) for number in self._numbers]
        # A step in which no variable of this part has a gradient counts too: Keras would count it, and move its averages. Such
        # a step steps this variable.
        with keras.device("cpu:0"):
            self._none = keras.Variable(np.zeros(1, np.float32), trainable=False, name="none")
        self._optimizer = copy_for(optimizer, originals, [*self._own, self._none])
        self._assign(state_of(optimizer, range(served.counter)))

    def load(self, state: OptimizerState) -> None:
        """Take over the present values of the variables, and the optimizer's state."""
        for number, own in zip(self._numbers, self._own, strict=True):
            own.assign(self._served.read(number))
        self._assign(state)

    def _assign(self, state: OptimizerState) -> None:
        self._kept.clear()
        assign_state(self._optimizer, state, self._numbers)

    def state(self) -> OptimizerState:
        """Return the optimizer's state for this part."""
        return state_of(self._optimizer, self._numbers)

    def step(self, pushes: Sequence[Push]) -> None:
        """See `hvdlite.async_sgd.part.ServerPart`."""
        with np.errstate(over="ignore", invalid="ignore"):  # on_nan="pass on"
            self._step(pushes)

    def _step(self, pushes: Sequence[Push]) -> None:
        total = sum(push.weight for push in pushes)
        if not total > 0:  # no rank had samples, so that there is no gradient on any server
            return
        settings = json.loads(pushes[0].settings)
        settings["learning_rate"] *= pushes[0].rate
        for name, value in settings.items():
            setattr(self._optimizer, name, value)
        dense = [self._served.tensors(push.gradients, self._layout) for push in pushes]
        pulled = pushes[0].pulled
        then = None if pulled is None else self._served.tensors(pulled, self._layout)
        gradients, variables = [], []
        for place, (number, own) in enumerate(zip(self._numbers, self._own, strict=True)):
            there = [
                (push.weight, tensors[number] if push.present[place] else self._served.dense(number, push.rows[place]))
                for push, tensors in zip(pushes, dense, strict=True)
                if push.present[place] or place in push.rows
            ]
            if there:
                # TensorFlow may keep the memory of a gradient, and that of a message is used again.
                mean = there[0][1].copy() if len(pushes) == 1 else _mean(there, total)
                if then is not None:
                    mean = self._correct(number, mean, self._served.as_array(number, own), then[number])
                gradients.append(mean)
                variables.append(own)
        if not variables:
            gradients, variables = [np.zeros(1, np.float32)], [self._none]
        with keras.device("cpu:0"):
            self._optimizer.apply([*map(keras.ops.convert_to_tensor, gradients)], variables)

    def _correct(self, number: int, gradient: Array, now: Array, then: Array) -> Array:
        """Correct a gradient for its delay."""
        wide = np.promote_types(gradient.dtype, np.float32)  # squares of gradients are too small for float16
        value, kept = self._compensation.corrected(
            gradient.astype(wide), now.astype(wide), then.astype(wide), self._kept.get(number)
        )
        if kept is not None:
            self._kept[number] = kept
        return np.asarray(value, gradient.dtype)

    def read(self, into: Array) -> None:
        """See `hvdlite.async_sgd.part.ServerPart`."""
        tensors = self._served.tensors(into, self._layout)
        for number, own in zip(self._numbers, self._own, strict=True):
            tensors[number][...] = self._served.as_array(number, own)
        counter = self._served.counter
        if counter in tensors:
            tensors[counter][...] = self._served.as_array(counter, self._optimizer._iterations)


def _mean(there: Sequence[tuple[float, Array]], total: float) -> Array:
    """Return the weighted sum of gradients divided by `total`, which also has the weights of ranks without a gradient."""
    dtype = there[0][1].dtype
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    summed = np.asarray(np.multiply(there[0][1], wide.type(there[0][0]), dtype=wide))
    for weight, gradient in there[1:]:
        summed += gradient if weight == 1 else gradient * wide.type(weight)
    summed /= wide.type(total)
    return np.asarray(summed, dtype)
