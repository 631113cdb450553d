"""What programs pass to operations, as TensorFlow's tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite.adapter.arguments import choose_op
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import ReduceOp
from hvdlite_tf.tensor import ADAPTER
from hvdlite_tf.variables import plain_variable


def is_group(given: Any) -> bool:
    """Whether this is a list (or tuple) of tensors; lists of numbers are tensors themselves, as everywhere in TensorFlow."""
    return isinstance(given, list | tuple) and (not given or any(hasattr(each, "shape") for each in given))


def tensors_of(given: Any) -> list[tf.Tensor]:
    """One tensor as a list, or the tensors of a group.

    Args:
        given: A dense tensor, eager or symbolic; a variable, of Keras too; or what `tf.convert_to_tensor` takes. Or a list
            of them.

    Returns:
        Tensors.

    Raises:
        UnsupportedTensorError: It is none of those, or has no numbers in it.
    """
    return [as_tensor(each) for each in (given if is_group(given) else [given])]


def as_tensor(given: Any) -> tf.Tensor:
    """One of `tensors_of`."""
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
    """Let Horovod's `groups` and `num_groups` pass, which have no effect, since all gradients travel together anyway.

    Args:
        num_groups: A number.
        groups: A number, lists of variables, or None.

    Raises:
        ArgumentError: They are something else.
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
    """The operation that `op` and its old spelling `average` ask for together, one of which may be given.

    Raises:
        ArgumentError: Both are given.
    """
    return choose_op(op, average)
