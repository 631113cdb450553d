"""The operations of ``horovod.tensorflow``, which differ from those of `hvdlite_tf` in their gradients and errors.

With n ranks, the gradients of Horovod's `allgather` and `broadcast` are the gradients of `hvdlite_tf` divided by n, and the
gradients of Horovod's `reducescatter` are n times as large. The learning rates of programs that differentiate these operations
were chosen for that. All errors are also those of TensorFlow: see `hvdlite_tf.horovod.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

import hvdlite_tf as own
from hvdlite.adapter.arguments import as_list, divided, with_first, with_scaled_input
from hvdlite.errors import ArgumentError, NotYetError
from hvdlite_tf.horovod.errors import with_tensorflow_errors
from hvdlite_tf.keras import values
from hvdlite_tf.ops.arguments import as_tensor, is_group
from hvdlite_tf.ops.ordered import as_written
from hvdlite_tf.ops.sparse import refuse_slices

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
    return _plain(with_scaled_input(function, _scaled, factor))


def _plain(function: Callable[P, R]) -> Callable[P, R]:
    return as_written(with_tensorflow_errors(function))


def _allreducing(function: Callable[P, R]) -> Callable[P, R]:
    """Return an allreduce that raises NotImplementedError for what tf.IndexedSlices cannot do, as Horovod does."""

    def check(given: Any, said: Mapping[str, Any]) -> Any:
        if any(isinstance(each, tf.IndexedSlices) for each in as_list(given)):
            scales = {name: said.get(name, 1.0) for name in ("prescale_factor", "postscale_factor")}
            try:
                refuse_slices(said.get("op") or own.Average, **scales)
            except ArgumentError as error:
                raise NotYetError(str(error)) from None
        return given

    return _plain(with_first(function, check))


def _scattering(function: Callable[P, R]) -> Callable[P, R]:
    """Return a reducescatter that refuses scalars, as Horovod does: hvdlite's takes them for vectors of one element."""

    def check(given: Any, said: Mapping[str, Any]) -> Any:
        if any(not isinstance(each, tf.IndexedSlices) and as_tensor(each).shape.rank == 0 for each in as_list(given)):
            raise ArgumentError(
                f"{function.__name__}: a scalar has no rows to deal out to the ranks: reshape it to [1], or use allreduce."
            )
        return given

    return _with_gradient(with_first(function, check), float)


allreduce, grouped_allreduce = _allreducing(own.allreduce), _allreducing(own.grouped_allreduce)
alltoall, broadcast_ = _plain(own.alltoall), _plain(own.broadcast_)
allgather = _with_gradient(own.allgather, divided)
grouped_allgather = _with_gradient(own.grouped_allgather, divided)
broadcast = _with_gradient(own.broadcast, divided)
reducescatter, grouped_reducescatter = _scattering(own.reducescatter), _scattering(own.grouped_reducescatter)

keras_allreduce = _plain(values.allreduce)
keras_allgather = _with_gradient(values.allgather, divided)
keras_broadcast = _with_gradient(values.broadcast, divided)
keras_reducescatter = _scattering(values.reducescatter)
"""The operations of Horovod's Keras modules, which have fewer arguments."""

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]
