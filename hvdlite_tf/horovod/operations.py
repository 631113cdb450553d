"""The operations of ``horovod.tensorflow`` whose gradients are not those of the sum of all ranks' losses.

With n ranks, the gradients of Horovod's `allgather` and `broadcast` are the gradients of `hvdlite_tf` divided by n, and the
gradients of Horovod's `reducescatter` are n times as large. The learning rates of programs that differentiate these operations
were chosen for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

import hvdlite_tf as own
from hvdlite.adapter.arguments import divided, with_scaled_input
from hvdlite_tf.keras import values
from hvdlite_tf.ops.arguments import as_tensor, is_group
from hvdlite_tf.ops.ordered import as_written

P = ParamSpec("P")
R = TypeVar("R")


def _scaled(given: Any, factor: float) -> Any:
    """Return a tensor or a list of tensors unchanged, with gradients that are multiplied by a number."""
    if isinstance(given, tf.IndexedSlices):  # the operation itself takes it or raises
        return given
    if is_group(given):
        return [_scaled(each, factor) for each in given]
    tensor = as_tensor(given)
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return tensor

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def scale(same: tf.Tensor) -> Any:
        return tf.identity(same), lambda gradient: gradient * tf.cast(factor, gradient.dtype)

    return scale(tensor)


def _with_gradient(function: Callable[P, R], factor: Callable[[int], float]) -> Callable[P, R]:
    return as_written(with_scaled_input(function, _scaled, factor))


allgather = _with_gradient(own.allgather, divided)
grouped_allgather = _with_gradient(own.grouped_allgather, divided)
broadcast = _with_gradient(own.broadcast, divided)
reducescatter = _with_gradient(own.reducescatter, float)
grouped_reducescatter = _with_gradient(own.grouped_reducescatter, float)

keras_allgather = _with_gradient(values.allgather, divided)
keras_broadcast = _with_gradient(values.broadcast, divided)
keras_reducescatter = _with_gradient(values.reducescatter, float)
"""The operations of Horovod's Keras modules, which have fewer arguments."""

__all__ = ["allgather", "broadcast", "grouped_allgather", "grouped_reducescatter", "reducescatter"]
