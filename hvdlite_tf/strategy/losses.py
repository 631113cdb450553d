"""The losses of a step of Keras: on every rank they are those that one process has with the global batch.

Keras divides the sum of a batch's losses by the number of rows, or of steps that no mask hides, or by the sum of weights; or
not at all. A rank knows its own rows only, so the mean of the ranks' losses is another number. So they add up
sums and divisors::

    values of this rank's rows ─▶ sum ────┐ allreduce ─▶ sum ÷ divisor: the loss of one process
                       rows, mask, weights ┘                 │
    gradient of this rank's rows ◀─── × ranks ÷ `Share.scale`┘ (what `StrategyExchange` multiplies gradients by, reversed)

A loss that is one number for a batch, or has a value for a row that depends on other rows, is computed from the rows of all
ranks, which are gathered for it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite_tf.ops.allgather import allgather
from hvdlite_tf.ops.allreduce import allreduce
from hvdlite_tf.strategy.context import Share, share_here
from hvdlite_tf.variables import replaced

_MEANS = ("sum_over_batch_size", "mean", "auto")
_OVER_ROWS = ("circle", "hinge", "squared_hinge")
"""Keras' functions whose value for a row depends on the other rows: hinge losses look whether all labels are 0 or 1."""
_NEED_A_ROW = ("ctc", "categorical_hinge")
_SUMS = (type(None), keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
"""Regularizers whose values for rows add up; Keras' `get` makes one of these of a name."""
_REDUCTIONS = ("Mean", "Sum", "Max", "Min", "Prod")
_patching = threading.Lock()


@contextlib.contextmanager
def losses_of_all_rows(model: Any, share: Share) -> Iterator[None]:
    """In the body, a step of this model has the losses of one process.

    What `compute_loss` does, Keras' or the program's own, is in the units of one process. Its result is divided by the number
    of ranks, as Keras' steps expect.
    """
    strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else model.distribute_strategy
    extended, size = strategy.extended, strategy.num_replicas_in_sync
    _teach(keras.losses.Loss if isinstance(model, keras.Model) else sys.modules["tf_keras"].losses.Loss)
    convert = tf.__internal__.autograph
    plain = convert.tf_convert(model.compute_loss, convert.control_status_ctx())

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        with extended.as_one_process():
            loss = plain(*args, **kwargs)
        if size > 1 and tf.is_tensor(loss) and not tf.executing_eagerly() and _is_sum_over_rows(loss):
            raise ArgumentError(
                "the loss has a sum over this rank's rows (of a layer's add_loss, or of compute_loss), of which the ranks "
                "would take the mean: let it be a mean over rows; times the size of the global batch it has the same value."
            )
        return None if loss is None else loss / tf.cast(size, loss.dtype)

    with replaced(model, "compute_loss", compute_loss), contextlib.ExitStack() as regularizers:
        if isinstance(model, keras.Model):
            for layer in model._flatten_layers():
                if type(layer.activity_regularizer) not in _SUMS:
                    own = _of_all_rows(layer.activity_regularizer, share)
                    regularizers.enter_context(replaced(layer, "activity_regularizer", own))
        yield


def _is_sum_over_rows(loss: tf.Tensor, divisor: Any = None) -> bool:
    """Return whether a tensor of a graph is a sum over the rows of a batch, times constants, or such a sum is added in it.

    Only what is certain counts: rows of the data, which come through operations that keep rows apart.

    Args:
        loss: The tensor.
        divisor: The number by which it is divided afterwards: a sum that is divided by the number of its rows is a mean.
    """
    kind, inputs = loss.op.type, loss.op.inputs
    if kind in ("Identity", "Cast", "Neg", "StopGradient", "Reshape", "Squeeze"):
        return _is_sum_over_rows(inputs[0], divisor)
    if kind in ("Add", "AddV2", "AddN", "Sub", "Pack"):
        return any(_is_sum_over_rows(each, divisor) for each in inputs)
    if kind in ("Mul", "RealDiv", "DivNoNan"):
        first, second = inputs
        below = divisor if kind == "Mul" else tf.get_static_value(second)
        return (_is_constant(second) and _is_sum_over_rows(first, below)) or (
            kind == "Mul" and _is_constant(first) and _is_sum_over_rows(second, divisor)
        )
    if kind != "Sum":
        return False
    shape = inputs[0].shape
    is_mean = divisor is not None and divisor in (shape[:1].num_elements(), shape.num_elements())
    return (_reduces_rows(loss.op) and _has_rows(inputs[0]) and not is_mean) or _is_sum_over_rows(inputs[0], divisor)


def _reduces_rows(reduction: tf.Operation) -> bool:
    axes, rank = tf.get_static_value(reduction.inputs[1]), reduction.inputs[0].shape.rank
    return axes is not None and bool(rank) and 0 in np.ravel(axes) % rank


def _has_rows(tensor: tf.Tensor) -> bool:
    """Return whether the first dimension of a tensor of a graph is the rows of the data that the graph is given."""
    captured = {id(inside) for _, inside in getattr(tensor.graph, "captures", ())}
    seen: set[int] = set()
    rest = [tensor]
    while rest:
        tensor = rest.pop()
        operation = tensor.op
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if operation.type == "IteratorGetNext" or (
            operation.type == "Placeholder"
            and tensor.dtype not in (tf.resource, tf.variant)
            and id(tensor) not in captured
        ):
            return True
        if operation.type in _REDUCTIONS and _reduces_rows(operation):
            continue
        if operation.type == "MatMul":  # the second one is a weight
            rest += [] if operation.get_attr("transpose_a") else [operation.inputs[0]]
        elif operation.type not in ("Einsum", "Transpose", "Shape", "Size"):
            rest += operation.inputs
    return False


def _is_constant(tensor: tf.Tensor) -> bool:
    while tensor.op.type in ("Identity", "Cast"):
        tensor = tensor.op.inputs[0]
    return tensor.op.type in ("Const", "ReadVariableOp")


def _teach(kind: type[Any]) -> None:
    """Let the losses of Keras 3, or of tf_keras, have the value of one process in steps of a strategy."""
    with _patching:
        plain = kind.__call__
        if hasattr(plain, "_hvdlite_plain"):
            return

        @functools.wraps(plain)
        def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            share = share_here()
            if share is None:
                return plain(self, y_true, y_pred, sample_weight)
            return _loss_of_all_rows(plain, self, share, y_true, y_pred, sample_weight)

        call._hvdlite_plain = plain  # type: ignore[attr-defined]
        kind.__call__ = call


def _loss_of_all_rows(
    plain: Callable[..., Any], loss: Any, share: Share, y_true: Any, y_pred: Any, sample_weight: Any
) -> Any:
    """Return the value that `loss` has for the rows of all ranks, with the gradient of this rank's rows."""
    none = loss.reduction in (None, "none")
    size, replicas = hvdlite.size(), tf.distribute.get_strategy().num_replicas_in_sync
    if loss.reduction in _MEANS and not isinstance(loss, keras.losses.Loss):
        loss._get_reduction()  # tf_keras refuses a mean that is not one of `compile`, whose means it divides itself
        replicas = 1
    if none and replicas != 1:  # a train_step of the program's own reduces it
        return plain(loss, y_true, y_pred, sample_weight)
    found = None if _is_of_batch(loss) else _Unreduced(plain, loss, y_true, y_pred, sample_weight)
    if found is None or found.is_one_number:
        y_true, y_pred, sample_weight = (_gathered_all(each) for each in (y_true, y_pred, sample_weight))
        found = _Unreduced(plain, loss, y_true, y_pred, sample_weight)
        value = found.weighted if none else found.over(found.sums())
    elif none:
        value = _gathered(found.weighted)
    else:
        value = found.over(_summed(found.sums()))
    return _as_of_this_rank(value, share, size, replicas)


class _Unreduced:
    """The weighted values of a loss before they are reduced, and what they are divided by.

    Args:
        plain: Keras' method `Loss.__call__`.
        loss: The loss.
        y_true, y_pred, sample_weight: Its arguments.

    Attributes:
        weighted: The values multiplied by weights, and by 0 where a mask hides them.
        is_one_number: Whether the loss has one value for a batch.
    """

    def __init__(self, plain: Callable[..., Any], loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> None:
        unreduced: Any = object.__new__(type(loss))  # `copy.copy` of Keras' objects saves and loads them
        vars(unreduced).update(vars(loss))
        self._loss, values = loss, []
        own_call = loss.call

        def call(y_true: Any, y_pred: Any) -> Any:
            needs_a_row = _name_of(loss) in _NEED_A_ROW
            values.append(_with_a_row(own_call, y_true, y_pred) if needs_a_row else own_call(y_true, y_pred))
            return values[-1]

        unreduced.reduction, unreduced.call = "none", call
        self.weighted = plain(unreduced, y_true, y_pred, sample_weight)
        masks = [mask for mask in map(_mask_of, (y_pred, *values)) if mask is not None]
        self._mask = functools.reduce(tf.logical_and, (tf.cast(mask, tf.bool) for mask in masks)) if masks else None
        self._weights = sample_weight
        self.is_one_number = values[-1].shape.rank == 0

    def sums(self) -> tf.Tensor:
        """Return what adds up over the ranks: the sum, and the numbers by which reductions divide it, a float64 vector."""
        weighted, mask = self.weighted, self._mask
        shown = [1, 1] if mask is None else [tf.math.count_nonzero(mask), tf.size(mask)]
        numbers = [tf.reduce_sum(weighted), tf.size(weighted), *shown, self._weight()]
        return tf.stack([tf.cast(number, tf.float64) for number in numbers])

    def _weight(self) -> Any:
        """Return the sum of the weights for the reduction "mean_with_sample_weight"."""
        if self._loss.reduction != "mean_with_sample_weight":
            return 0
        if self._weights is None and self._mask is None:
            return tf.size(self.weighted)
        from keras.src.losses.loss import apply_mask

        dtype = self._loss.dtype
        weights = None if self._weights is None else tf.cast(self._weights, dtype)
        return tf.reduce_sum(apply_mask(weights, self._mask, dtype, self._loss.reduction))

    def over(self, sums: tf.Tensor) -> tf.Tensor:
        """Return the reduced loss for the result of `sums`, of this rank or of all."""
        total, count, shown, places, weight = tf.unstack(sums)
        divisor = tf.constant(1.0, tf.float64)
        if self._loss.reduction in _MEANS:
            divisor = tf.math.divide_no_nan(count * shown, places)
        elif self._loss.reduction == "mean_with_sample_weight":
            divisor = weight
        dtype = self.weighted.dtype if self.weighted.dtype.is_floating else tf.float32
        return tf.cast(tf.math.divide_no_nan(total, tf.stop_gradient(divisor)), dtype)


def _is_of_batch(loss: Any) -> bool:
    """Return whether this is a loss of Keras with values for rows that depend on the other rows."""
    axis = getattr(loss, "_fn_kwargs", {}).get("axis", getattr(loss, "axis", None))
    return 0 in (axis if isinstance(axis, list | tuple) else [axis]) or _name_of(loss) in _OVER_ROWS


def _name_of(loss: Any) -> str:
    """Return the name of Keras' function of a loss; an empty text for other losses."""
    function: Any = getattr(loss, "fn", None)
    known = str(getattr(function, "__module__", "")).split(".")[0] in ("keras", "tf_keras")
    return str(function.__name__) if known else ""


def _with_a_row(call: Callable[..., Any], y_true: Any, y_pred: Any) -> Any:
    """Return the values of a loss that Keras cannot compute for no rows: a rank without rows takes one, and drops its value."""
    rows = tf.shape(y_pred)[0]

    def padded(tensor: Any) -> Any:
        more = tf.zeros([tf.cast(rows == 0, tf.int32), *tf.unstack(tf.shape(tensor)[1:])], tensor.dtype)
        return tf.concat([tensor, more], 0)

    return call(padded(y_true), padded(y_pred))[:rows]


def _mask_of(tensor: Any) -> Any:
    return getattr(tensor, "_keras_mask", None)


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _summed(own: tf.Tensor) -> Any:
    """Return the sum over the ranks; its gradient is that of this rank's own summand."""
    return allreduce(own, op=hvdlite.Sum), lambda gradient: gradient


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _gathered(own: tf.Tensor) -> Any:
    """Return the rows of all ranks; the gradient is that of this rank's own rows."""
    rows = tf.shape(own)[:1]
    start = tf.reduce_sum(allgather(rows)[: hvdlite.rank()])
    return allgather(own), lambda gradient: gradient[start : start + rows[0]]


def _gathered_all(values: Any) -> Any:
    """Return nested tensors with the rows of all ranks, and with their masks; what has no rows stays as it is."""

    def gathered(value: Any) -> Any:
        if value is None or (tensor := tf.convert_to_tensor(value)).shape.rank == 0:
            return value
        found = _gathered(tensor)
        if (mask := _mask_of(value)) is not None:
            found._keras_mask = allgather(mask)
        return found

    return tf.nest.map_structure(gathered, values)


def _as_of_this_rank(value: tf.Tensor, share: Share, size: int, replicas: int) -> tf.Tensor:
    """Return a loss of all ranks as Keras expects it from a replica: the ranks' losses add up to it.

    The optimizer weights this rank's gradients by `Share.scale` later, and a loss of one process is divided by `size`.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def scaled(loss: tf.Tensor) -> Any:
        def backward(gradient: tf.Tensor) -> tf.Tensor:
            return tf.math.divide_no_nan(gradient * (size / replicas), tf.cast(share.scale, gradient.dtype))

        return loss / replicas, backward

    found: tf.Tensor = scaled(value)
    return found


def _of_all_rows(regularizer: Callable[[Any], Any], share: Share) -> Callable[[Any], Any]:
    """Return a regularizer of a layer's output whose value is that for the rows of all ranks, in the units of one process.

    Keras divides the value by the number of rows, which is this rank's.
    """

    def regularized(output: Any) -> Any:
        value = regularizer(_gathered(output))
        own = tf.cast(share.rows / tf.math.maximum(share.everybody, 1.0), value.dtype)
        return _as_of_this_rank(value, share, hvdlite.size(), 1) * own

    return regularized
