"""The backend TensorFlow for the optimizers of Keras 3. See `hvdlite_tf.optimizers.backends.Backend`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.protocols import Array, TensorInfo
from hvdlite_tf.gradients.exchange import GradientExchange
from hvdlite_tf.ops.ordered import ordered


class TensorFlow:
    """The backend TensorFlow, whose training steps may be tf.functions."""

    def exchange(self, options: ExchangeOptions, identity: Identity) -> GradientExchange:
        return GradientExchange(options, identity)

    def weight(self) -> Any:
        with tf.init_scope(), tf.device("CPU:0"):
            variable = tf.Variable(1.0, dtype=tf.float64, trainable=False, name="hvdlite_weight")
        return variable

    def call(
        self,
        function: Callable[..., Sequence[Array]],
        tensors: Sequence[Any],
        results: Sequence[TensorInfo | str],
        after: Sequence[Any] = (),
    ) -> list[Any]:
        specs = [
            tf.TensorSpec(None, each) if isinstance(each, str) else tf.TensorSpec(each.shape, each.dtype)
            for each in results
        ]
        with tf.control_dependencies(list(after)):
            return ordered(function, [tf.convert_to_tensor(each) for each in tensors], specs)

    def after(self, tensors: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if tf.executing_eagerly() else tf.control_dependencies(list(tensors))

    def shield(self, optimizer: Any) -> None:
        kind = type(optimizer)  # the class of this object alone
        kind.apply = tf.autograph.experimental.do_not_convert(kind.apply)
