"""`broadcast_variables`: sends variables from one rank to all ranks, in eager code and in graphs."""

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
from hvdlite_tf.split import check_apart
from hvdlite_tf.training.objects import broadcast_eagerly
from hvdlite_tf.variables import is_own


@as_written
def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, process_set: ProcessSet = Everybody, inplace: bool = False
) -> tf.Operation | None:
    """Overwrite the variables of every rank with the root's values, but gradients that an optimizer of each rank adds up.

    Args:
        variables: Variables of TensorFlow or Keras, such as ``model.weights``, in the same order on every rank. Do not pass
            ``model.variables``: it includes the states of random number generators, so dropout would be equal on all ranks.
        root_rank: The rank in the job of the root, whose values all ranks get; also with a process set.
        process_set: The ranks that take part.
        inplace: Horovod's argument, which has no effect: variables are always changed in place.

    Returns:
        In a graph for a session, the operation that broadcasts. Otherwise None: eager code has broadcast the variables, and a
        tf.function broadcasts them when it runs.

    Raises:
        ArgumentError: `variables` is not a list of variables, or ranks have different stages of a model.
        UnsupportedTensorError: An element is not a variable.
        MismatchError: The ranks have different variables. All ranks raise it.
        tf.errors.OpError: An error was only seen when a graph ran; the text is that of hvdlite's error.

    Examples:
        >>> def start():
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.set_weights([np.full((1, 1), hvd.rank()), np.full(1, hvd.rank())])
        ...     hvd.broadcast_variables(model.weights, root_rank=1)
        ...     return [weight.tolist() for weight in model.get_weights()]
        >>> on_ranks(2, start)
        [[[[1.0]], [1.0]], [[[1.0]], [1.0]]]
    """
    if not isinstance(variables, Iterable):
        raise ArgumentError(
            "broadcast_variables takes a list of variables, such as model.weights or optimizer.variables; got a "
            f"{type(variables).__name__}."
        )
    listed = [each for each in variables if not is_own(each)]
    check_apart(listed, process_set)
    if listed and keras.backend.backend() != "tensorflow" and all(isinstance(each, keras.Variable) for each in listed):
        broadcast_eagerly(listed, root_rank, process_set)
        return None
    return operation_of(broadcast_(listed, root_rank, process_set=process_set))
