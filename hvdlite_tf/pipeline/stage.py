"""`KerasStagePasses`: the forward and the backward passes of micro-batches through the stage of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdlite.adapter.pipeline.bubble import Bubble
from hvdlite_tf.pipeline.checks import check_no_mask, check_untrained, foreign_variables

Loss = Callable[[int, Any], tuple[Any, float]]
"""``loss(part, output)`` returns the loss of a micro-batch from the output of the last stage, and its share in the batch's."""


class _TapedPass(NamedTuple):
    """A forward pass whose backward pass has not come yet."""

    tape: tf.GradientTape
    inputs: list[Any]
    targets: list[Any]
    """The outputs that have gradients; and a scalar, the loss of this stage."""


class KerasStagePasses:
    """The passes of micro-batches through one model. See `hvdlite.adapter.pipeline.relay.Stage`.

    Args:
        model: The stage.
        bubble: Measures the passes.
        place, places: The number of the stage, and how many stages there are.

    Attributes:
        gradients: The sum of the micro-batches' gradients so far, for each variable that is trained.
        outputs: On the last stage, the outputs of a prediction.
        total: On the last stage, the loss of the micro-batches so far, with regularization.
    """

    def __init__(self, model: keras.Model, bubble: Bubble, place: int, places: int) -> None:
        self._model, self._bubble = model, bubble
        self.place, self.is_first, self.is_last = place, place == 0, place == places - 1
        self._passes: dict[int, _TapedPass] = {}
        self._dtype = tf.as_dtype(keras.config.floatx())  # of losses
        self._compiled = tf.function(self._call, autograph=False)
        self.begin([], [], None, False)

    def _call(self, x: Any, training: bool) -> tuple[Any, Any]:
        """Return the output, and the sum of the regularization losses of the layers."""
        output = self._model(x, training=training)
        check_no_mask(output)
        losses = [tf.cast(loss, self._dtype) for loss in self._model.losses]
        return output, (tf.add_n(losses) if losses else tf.zeros((), self._dtype))

    def begin(
        self, x: Sequence[Any], shares: Sequence[float], loss: Loss | None, trains: bool, scale: float = 1.0
    ) -> None:
        """Begin a step: there are no gradients yet.

        Args:
            x: The input of each micro-batch.
            shares: The share of each in the samples of the batch, which counts for regularization.
            loss: The loss, for the last stage; None for a prediction.
            trains: Whether there are backward passes.
            scale: The factor of the gradients, by which the optimizer divides them.
        """
        self._scale = scale
        self._x, self._shares, self._loss, self._trains = x, shares, loss, trains
        self._passes.clear()
        self.gradients: list[Any] = [None] * len(self._model.trainable_variables)
        self.outputs: list[Any] = []
        self.total = tf.zeros((), self._dtype)

    def forward(self, part: int, values: Any) -> Any:
        x, before = values or (self._x[part], tf.zeros((), self._dtype))
        watched = self._trains and not self.is_first
        inputs = [tensor for tensor in keras.tree.flatten(x) if watched and tensor.dtype.is_floating]
        with (
            self._bubble.computing("FORWARD", part, self.place, in_step=self._trains),
            tf.GradientTape(watch_accessed_variables=self._trains) as tape,
        ):
            tape.watch(inputs)
            output, own = self._compiled(x, training=self._trains)
            targets = [own * self._shares[part]]
            if self.is_last and self._loss is not None:
                value, share = self._loss(part, output)
                targets = [value * share + tf.cast(targets[0], value.dtype)]
        if self.is_last:
            earlier = tf.cast(before * self._shares[part], targets[0].dtype)
            self.total = tf.cast(self.total, targets[0].dtype) + targets[0] + earlier
            if self._loss is None:
                self.outputs.append(output)
        else:
            targets = [*_floating(output), *targets]
        if self._trains:
            self._passes[part] = _TapedPass(tape, inputs, targets)
        return output, before + own

    def backward(self, part: int, values: Any) -> Any:
        tape, inputs, targets = self._passes.pop(part)
        seeds = [*(values or []), tf.ones_like(targets[-1]) * tf.cast(self._scale, targets[-1].dtype)]
        variables = [variable.value for variable in self._model.trainable_variables]
        foreign = foreign_variables(tape, self._model)
        with self._bubble.computing("BACKWARD", part, self.place):
            found = tape.gradient(targets, [*inputs, *variables, *foreign], output_gradients=seeds)
        check_untrained(foreign, found[len(inputs) + len(variables) :], self.place, self.is_last)
        own = [
            tf.zeros_like(tensor) if gradient is None else tf.convert_to_tensor(gradient)
            for tensor, gradient in zip(inputs, found, strict=False)
        ]
        of_weights = found[len(inputs) : len(inputs) + len(variables)]
        self.gradients = list(map(_sum, self.gradients, of_weights))
        return own


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
