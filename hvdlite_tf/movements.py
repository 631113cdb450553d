"""Operations that move the ranks' tensors as they are: allgather, broadcast and alltoall.

The names, and the order and defaults of the arguments, are Horovod's. They work eagerly, in a tf.function and in a graph for a
session, and are differentiable. Gradients are those of the sum of all ranks' losses. Each gradient is an exchange whose own
gradient is the operation that it belongs to::

    allgather ⟷ sum, of which each rank keeps the rows that it had given
    broadcast ⟷ sum, which the root keeps
    alltoall  ⟷ alltoall, back to the senders
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet
from hvdlite.arguments import group_of, rank_in, root_within, size_of
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import Array
from hvdlite_tf.arguments import as_tensor, is_group, tensors_of
from hvdlite_tf.differentiable import Tensors, differentiable, exchange
from hvdlite_tf.graph import as_written, name_of_call, ordered
from hvdlite_tf.tensor import plain_variable

T = TypeVar("T")
Everybody = hvdlite.global_process_set


@as_written
def allgather(
    tensor: T, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = Everybody
) -> T:
    """Concatenate the ranks' tensors along the first dimension. Differentiable.

    The gradient is the sum over the ranks of that of this rank's rows.

    Args:
        tensor: The first dimension may differ between ranks and may be 0; the others and the dtype are the same. Scalars count
            as vectors of one. Or a list of tensors.
        name: As in `allreduce`.
        ignore_name_scope: As in `allreduce`.
        process_set: As in `allreduce`.

    Returns:
        The rows of all ranks in rank order, on every rank.

    Raises:
        UnsupportedTensorError: `tensor` is none.
        MismatchError: The ranks' calls do not belong together; raised on all of them.
        DuplicateNameError: `name` is in flight.
        tf.errors.OpError: As in `allreduce`.
    """
    tensors = tensors_of(tensor)

    def run(arrays: list[Array], label: str | None) -> Sequence[Array]:
        return hvdlite.allgather(arrays, label, process_set=process_set)

    def backward(gradients: Tensors) -> Tensors:
        rows = _sum_of_own_rows(gradients, [_rows(each) for each in tensors], process_set)
        return [_reshape_like(each, given) for each, given in zip(rows, tensors, strict=True)]

    given: Any = tensors if is_group(tensor) else tensors[0]
    gathered: T = differentiable(given, run, _any_rows, backward, process_set, name)
    return gathered


@as_written
def grouped_allgather(
    tensors: Iterable[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = Everybody,
) -> list[tf.Tensor]:
    """`allgather` of several tensors at once, of any dtypes and shapes. Arguments as there; returns a list."""
    return allgather(group_of(tensors), name, ignore_name_scope, process_set)


@as_written
def broadcast(
    tensor: T,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = Everybody,
) -> T:
    """Give every rank the root's tensor. Differentiable.

    The root's gradient is the sum over the ranks of theirs; the others' is 0.

    Args:
        tensor: Of the same shape and dtype on every rank; or a list of tensors.
        root_rank: Whose values to send; its rank in the job, with a process set too.
        name: As in `allreduce`.
        ignore_name_scope: As in `allreduce`.
        process_set: As in `allreduce`.

    Returns:
        A new tensor like the root's.

    Raises:
        ArgumentError: `root_rank` is not a rank of the set.
        Others: As `allgather`.
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
    """Overwrite the variables of every rank with the root's, in place. Not differentiable.

    Args:
        variables: Those of TensorFlow or Keras, the same on every rank. In a graph for a session, they must have been
            initialized on every rank.
        root_rank: Whose values everybody gets; its rank in the job, with a process set too.
        name: As in `allreduce`.
        process_set: As in `allreduce`.

    Returns:
        The values that they have then.

    Raises:
        UnsupportedTensorError: One of them is no variable.
        Others: As `broadcast`.
    """
    root = root_within(process_set, root_rank)
    size_of(process_set)  # raises here already, in graphs too
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


@as_written
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = Everybody,
) -> Any:
    """Send a slice of the rows to each rank, and receive one from each. Differentiable: the gradients take the way back.

    Args:
        tensor: At least 1-d; the first dimension may differ between ranks.
        splits: For each rank, how many rows it gets (whole numbers that add up to the first dimension); equal shares if None.
        name: As in `allreduce`.
        ignore_name_scope: As in `allreduce`.
        process_set: As in `allreduce`.

    Returns:
        The rows received, in the order of their senders. With `splits`, a pair of these and how many came from each rank
        (an int32 tensor with as many elements as there are ranks).

    Raises:
        ArgumentError: `splits` does not fit.
        Others: As `allgather`.
    """
    if is_group(tensor):
        raise ArgumentError(f"alltoall takes one tensor; got a {type(tensor).__name__}. hvdlite.alltoall takes lists.")
    size = size_of(process_set)

    def run(arrays: list[Array], label: str | None) -> Sequence[Array]:
        rows, *given = arrays
        # The core says how many rows came from each rank only where it was given some numbers.
        divides = not given and rows.ndim and rows.shape[0] % size == 0
        counts: Any = [rows.shape[0] // size] * size if divides else (given[0] if given else None)
        received: tuple[Array, Array] = hvdlite.alltoall(rows, counts, label, process_set=process_set)
        return received

    def backward(gradients: Tensors, results: Tensors) -> Tensors:
        return [alltoall(gradients[0], results[1], process_set=process_set)[0]]

    given = as_tensor(tensor)
    tensors = [given] if splits is None else [given, as_tensor(splits)]
    rows, received = exchange(tensors, run, [_any_rows(given), tf.TensorSpec((size,), tf.int32)], backward, name)
    return rows if splits is None else (rows, received)


def _sum_of_own_rows(gathered: Tensors, lengths: Tensors, process_set: ProcessSet) -> Tensors:
    """Sum gathered tensors over the ranks, and keep those rows that this rank had given: `lengths` (int64), of each."""

    def run(arrays: list[Array], label: str | None) -> Sequence[Array]:
        *gradients, own = arrays
        rank = rank_in(process_set)
        # Each row says whose it is, for ranks that have joined send none.
        table = hvdlite.allgather(
            np.array([[rank, *own]]), None if label is None else f"{label}.rows", process_set=process_set
        )
        if table[:, 1:].sum(0).tolist() != [len(gradient) for gradient in gradients]:
            raise ArgumentError("a rank joined between an allgather and its gradient: join after the gradient.")
        starts = table[table[:, 0] < rank, 1:].sum(0)
        summed = hvdlite.allreduce(gradients, hvdlite.Sum, label, process_set=process_set)
        return [each[start : start + length].copy() for each, start, length in zip(summed, starts, own, strict=True)]

    def backward(gradients: Tensors, _: Tensors) -> Tensors:
        return allgather(gradients, process_set=process_set)

    return exchange([*gathered, tf.stack(lengths)], run, [_any_rows(each) for each in gathered], backward)


def _rows(tensor: tf.Tensor) -> tf.Tensor:
    """How many rows a tensor gives to an allgather, as int64."""
    return tf.size(tensor, tf.int64) if tensor.shape.rank == 0 else tf.shape(tensor, tf.int64)[0]


def _any_rows(tensor: tf.Tensor) -> tf.TensorSpec:
    """Any number of rows like a tensor's."""
    rank = tensor.shape.rank
    shape = tf.TensorShape(None) if rank is None else [None, *tensor.shape[1:]]
    return tf.TensorSpec(shape, tensor.dtype)


def _reshape_like(rows: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    reshaped = tf.reshape(rows, tf.shape(tensor))
    reshaped.set_shape(tensor.shape)
    return reshaped
