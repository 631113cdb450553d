"""The arguments of operations as TensorFlow's tensors, and checks of arguments."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite.adapter.arguments import choose_op
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import ReduceOp
from hvdlite_tf.tensor import ADAPTER
from hvdlite_tf.variables import plain_variable


def is_group(given: Any) -> bool:
    """Return whether this is a list (or tuple) of tensors. A list of numbers is one tensor, as everywhere in TensorFlow."""
    return isinstance(given, list | tuple) and (not given or any(hasattr(each, "shape") for each in given))


def tensors_of(given: Any) -> list[tf.Tensor]:
    """Return the tensors of an operation's argument as a list.

    Args:
        given: A dense tensor, eager or symbolic; a variable of TensorFlow or Keras; a value that `tf.convert_to_tensor` takes;
            or a list of these.

    Returns:
        One tensor for each element of a list; otherwise a list of one tensor.

    Raises:
        UnsupportedTensorError: An element is none of these, or its dtype is not numeric.
    """
    return [as_tensor(each) for each in (given if is_group(given) else [given])]


def as_tensor(given: Any) -> tf.Tensor:
    """Return one dense tensor for a value that `tensors_of` takes.

    Raises:
        UnsupportedTensorError: See `tensors_of`.
    """
    given = plain_variable(given)
    if isinstance(given, tf.IndexedSlices | tf.SparseTensor | tf.RaggedTensor):
        raise UnsupportedTensorError(
            f"expected a dense tensor; got a {type(given).__name__}. Use tf.convert_to_tensor(x), or tf.sparse.to_dense(x), "
            "or x.to_tensor()."
        )
    try:
        tensor = tf.convert_to_tensor(given)
    except (TypeError, ValueError) as error:
        raise UnsupportedTensorError(f"expected a tensor; got {type(given).__name__} {given!r} ({error}).") from error
    ADAPTER.dtype(tensor)
    return tensor


def check_groups(num_groups: int, groups: Any) -> None:
    """Raise ArgumentError unless Horovod's arguments `num_groups` and `groups` are valid.

    They have no effect, because all gradients are exchanged together.

    Args:
        num_groups: A number of groups, 0 or more.
        groups: A number of groups, lists of variables, or None.

    Raises:
        ArgumentError: A number is negative, or `groups` is something else.
    """
    for number in (num_groups, groups):
        if isinstance(number, int) and number < 0:
            raise ArgumentError(f"groups={number}: expected a number of groups, or lists of variables.")
    if (
        groups is not None
        and not isinstance(groups, int)
        and not all(isinstance(each, list | tuple) for each in groups)
    ):
        raise ArgumentError(f"groups={groups!r}: expected a number of groups, or lists of variables.")


def handle_average_backwards_compatibility(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the reduction that `op` or its old spelling `average` asks for; Average if both are None.

    Raises:
        ArgumentError: Both are given.

    Examples:
        >>> hvd.handle_average_backwards_compatibility(None, None) is hvd.Average
        True
    """
    return choose_op(op, average)
