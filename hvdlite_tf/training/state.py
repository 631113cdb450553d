"""What one rank has, for all: variables, in eager code and in graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from hvdlite import ProcessSet
from hvdlite.adapter.arguments import Everybody
from hvdlite.errors import ArgumentError
from hvdlite_tf.ops.broadcast import broadcast_
from hvdlite_tf.ops.ordered import as_written, operation_of
from hvdlite_tf.training.objects import broadcast_eagerly


@as_written
def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, process_set: ProcessSet = Everybody, inplace: bool = False
) -> tf.Operation | None:
    """Overwrite the variables of every rank with the root's.

    Args:
        variables: Those of TensorFlow or Keras, such as ``model.weights``, in the same order on every rank. (Not
            ``model.variables``: the states of random number generators are among them, and would make dropout equal.)
        root_rank: Whose values everybody gets; its rank in the job, with a process set too.
        process_set: The ranks that take part.
        inplace: Horovod's. Variables are always written into.

    Returns:
        In a graph for a session, the operation that does it. Else None: in eager code it is done, and a tf.function does it.

    Raises:
        ArgumentError: It is no list of variables.
        UnsupportedTensorError: One of them is no variable.
        MismatchError: The ranks have different variables; raised on all of them.
        tf.errors.OpError: As in `allreduce`.
    """
    if not isinstance(variables, Iterable):
        raise ArgumentError(
            "broadcast_variables takes a list of variables, such as model.weights or optimizer.variables; got a "
            f"{type(variables).__name__}."
        )
    listed = list(variables)
    if listed and keras.backend.backend() != "tensorflow" and all(isinstance(each, keras.Variable) for each in listed):
        broadcast_eagerly(listed, root_rank, process_set)
        return None
    return operation_of(broadcast_(listed, root_rank, process_set=process_set))
