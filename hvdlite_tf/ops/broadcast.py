"""Broadcast: one rank's tensor on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.arguments import Everybody, group_of, rank_in, root_within, size_of
from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import Array
from hvdlite_tf.ops.arguments import as_tensor
from hvdlite_tf.ops.differentiable import Tensors, differentiable
from hvdlite_tf.ops.ordered import as_written, name_of_call, ordered
from hvdlite_tf.variables import plain_variable

T = TypeVar("T")


@as_written
def broadcast(
    tensor: T,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = Everybody,
) -> T:
    """Give every rank the root's tensor. See `hvdlite.broadcast` for the other arguments, the result and the errors.

    The function is differentiable: the root's gradient is the sum of all ranks' gradients, and the gradient of the other ranks
    is 0.

    Args:
        root_rank: The rank in the job of the root, also with a process set. (`hvdlite.broadcast` takes the rank in the set.)
        ignore_name_scope: Horovod's argument, which has no effect.

    Examples:
        >>> on_ranks(2, lambda: hvd.broadcast(tf.constant([hvd.rank()]), root_rank=1).numpy().tolist())
        [[1], [1]]
    """
    root = root_within(process_set, root_rank)

    def run(arrays: list[Array], label: str | None) -> Sequence[Array]:
        return hvdlite.broadcast(arrays, root, label, process_set=process_set)

    def run_backward(arrays: list[Array], label: str | None) -> Sequence[Array]:
        summed = hvdlite.allreduce(arrays, hvdlite.Sum, label, process_set=process_set)
        return summed if rank_in(process_set) == root else [np.zeros_like(each) for each in summed]

    def backward(gradients: Tensors) -> Tensors:
        def again(gradients: Tensors) -> Tensors:
            return broadcast(gradients, root_rank, process_set=process_set)

        summed: Tensors = differentiable(gradients, run_backward, tf.TensorSpec.from_tensor, again, process_set)
        return summed

    sent: T = differentiable(tensor, run, tf.TensorSpec.from_tensor, backward, process_set, name)
    return sent


@as_written
def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = Everybody
) -> list[tf.Tensor]:
    """Overwrite the variables of every rank with the root's values, in place. The function is not differentiable.

    Args:
        variables: Variables of TensorFlow or Keras, of the same shapes and dtypes on every rank. In a graph for a session, they
            must have been initialized on every rank.
        root_rank: See `broadcast`.
        name: See `hvdlite.broadcast`.
        process_set: See `hvdlite.broadcast`.

    Returns:
        The new values of the variables, as tensors.

    Raises:
        UnsupportedTensorError: An element of `variables` is not a variable.
        HvdliteError: See `hvdlite.broadcast`.

    Examples:
        >>> def overwritten():
        ...     variable = tf.Variable([hvd.rank()])
        ...     hvd.broadcast_([variable], root_rank=1)
        ...     return variable.numpy().tolist()
        >>> on_ranks(2, overwritten)
        [[1], [1]]
    """
    root = root_within(process_set, root_rank)
    size_of(process_set)  # an error is raised here, also while a graph is built
    plain = [plain_variable(variable) for variable in group_of(variables)]
    for variable in plain:
        if not isinstance(variable, tf.Variable):
            raise UnsupportedTensorError(
                f"expected a variable, of TensorFlow or Keras; got {type(variable).__name__}, which cannot be changed in "
                "place: use broadcast, which returns a new tensor."
            )
    label = name_of_call(name)

    def run(*arrays: Array) -> Sequence[Array]:
        return hvdlite.broadcast(list(arrays), root, label, process_set=process_set)

    tensors = [as_tensor(variable) for variable in plain]
    values = ordered(run, tensors, [tf.TensorSpec.from_tensor(tensor) for tensor in tensors], channel=label or "")
    written = [variable.assign(value) for variable, value in zip(plain, values, strict=True)]
    return [tf.convert_to_tensor(variable) for variable in written]
