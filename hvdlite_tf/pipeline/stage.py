"""`Stage`: the forward and the backward passes of micro-batches through the stage of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdlite.adapter.pipeline.bubble import Bubble
from hvdlite_tf.pipeline.checks import check_no_mask
from hvdlite_tf.pipeline.messages import Messages

_FORWARD, _BACKWARD = 0, 1
"""The tags of the messages."""

Loss = Callable[[Any], Any]
"""Returns the loss of a micro-batch from the output of the last stage."""


class _Pass(NamedTuple):
    """A forward pass whose backward pass has not come yet."""

    tape: tf.GradientTape
    inputs: list[Any]
    targets: list[Any]
    """The outputs that have gradients; and a scalar, the loss of this stage."""


class Stage:
    """The passes of micro-batches through one model, whose neighbours are on other ranks.

    Args:
        model: The stage.
        messages: Messages between the ranks of the pipeline.
        bubble: Measures the passes.
        place, places: The number of the stage, and how many stages there are.
    """

    def __init__(self, model: keras.Model, messages: Messages, bubble: Bubble, place: int, places: int) -> None:
        self._model, self._messages, self._bubble = model, messages, bubble
        self.place, self.is_first, self.is_last = place, place == 0, place == places - 1
        self._passes: dict[int, _Pass] = {}
        self.gradients: list[Any] = []
        """The sum of the micro-batches' gradients so far, for each variable that is trained."""
        self._dtype = tf.as_dtype(keras.config.floatx())  # of losses
        self._compiled = tf.function(self._call, autograph=False)

    def _call(self, x: Any, training: bool) -> tuple[Any, Any]:
        """Return the output, and the sum of the regularization losses of the layers."""
        output = self._model(x, training=training)
        check_no_mask(output)
        losses = [tf.cast(loss, self._dtype) for loss in self._model.losses]
        return output, (tf.add_n(losses) if losses else tf.zeros((), self._dtype))

    def begin(self) -> None:
        """Begin a step: there are no gradients yet."""
        self._passes.clear()
        self.gradients = [None] * len(self._model.trainable_variables)

    def _input(self, x: Any) -> tuple[Any, Any]:
        """Return this stage's input, and the sum of the regularization losses of the stages before."""
        return (x, tf.zeros((), self._dtype)) if self.is_first else self._messages.receive(self.place - 1, _FORWARD)

    def evaluate(self, x: Any) -> tuple[Any, Any]:
        """Send a batch through this stage, without gradients.

        Returns:
            The output of this stage, and the regularization losses so far.
        """
        x, before = self._input(x)
        output, own = self._compiled(x, training=False)
        if not self.is_last:
            self._messages.send((output, before + own), self.place + 1, _FORWARD)
        return output, before + own

    def forward(self, number: int, x: Any, loss: Loss, share: float) -> tuple[Any, Any] | None:
        """Make the forward pass of a micro-batch.

        Args:
            number: The number of the micro-batch.
            x: The input of the first stage.
            loss: The loss, for the last stage.
            share: The factor of this micro-batch's loss in that of the batch.

        Returns:
            On the last stage, the output and the loss of the micro-batch, with regularization; else None.
        """
        x, before = self._input(x)
        inputs = [tensor for tensor in keras.tree.flatten(x) if tensor.dtype.is_floating and not self.is_first]
        with self._bubble.computing("FORWARD", number, self.place), tf.GradientTape() as tape:
            tape.watch(inputs)
            output, own = self._compiled(x, training=True)
            if self.is_last:
                value = loss(output)
                total = value + tf.cast(own, value.dtype)
                targets = [total * share]
            else:
                targets = [*_floating(output), own * share]
        self._passes[number] = _Pass(tape, inputs, targets)
        if self.is_last:
            return output, total + tf.cast(before, total.dtype)
        self._messages.send((output, before + own), self.place + 1, _FORWARD)
        return None

    def backward(self, number: int) -> None:
        """Make the backward pass of a micro-batch, and add to `gradients`."""
        tape, inputs, targets = self._passes.pop(number)
        seeds: list[Any] = [] if self.is_last else self._messages.receive(self.place + 1, _BACKWARD)
        variables = [variable.value for variable in self._model.trainable_variables]
        seeds.append(tf.ones_like(targets[-1]))
        with self._bubble.computing("BACKWARD", number, self.place):
            found = tape.gradient(targets, [*inputs, *variables], output_gradients=seeds)
        if not self.is_first:
            own = [
                tf.zeros_like(tensor) if gradient is None else tf.convert_to_tensor(gradient)
                for tensor, gradient in zip(inputs, found, strict=False)
            ]
            self._messages.send(own, self.place - 1, _BACKWARD)
        self.gradients = list(map(_sum, self.gradients, found[len(inputs) :]))

    def finish(self) -> None:
        """Wait until the neighbours have received everything."""
        self._messages.finish()


def _floating(output: Any) -> list[Any]:
    return [tensor for tensor in keras.tree.flatten(output) if tensor.dtype.is_floating]


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of two gradients, of which each may be None or, of an embedding, rows."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        values, indices = tf.concat([one.values, other.values], 0), tf.concat([one.indices, other.indices], 0)
        return tf.IndexedSlices(values, indices, one.dense_shape)
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)


def one_forward_one_backward(place: int, places: int, microbatches: int) -> Sequence[tuple[bool, int]]:
    """Return the passes of one stage in order: for each, whether it is a forward pass, and the number of the micro-batch.

    A stage begins with as many forward passes as there are stages after it. Then forward and backward passes take turns, so
    that it holds few micro-batches at a time (PipeDream-Flush, arXiv:2006.09503).
    """
    first = min(places - 1 - place, microbatches)
    passes = [(True, number) for number in range(first)]
    for number in range(microbatches):
        if first + number < microbatches:
            passes.append((True, first + number))
        passes.append((False, number))
    return passes
