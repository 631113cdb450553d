"""Allgather: the rows of all ranks, on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.arguments import Everybody, group_of
from hvdlite.adapter.rows import starts_of_own_rows
from hvdlite.protocols import Array
from hvdlite_tf.ops.arguments import is_group, tensors_of
from hvdlite_tf.ops.differentiable import Tensors, differentiable, exchange
from hvdlite_tf.ops.ordered import as_written

T = TypeVar("T")


@as_written
def allgather(
    tensor: T, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = Everybody
) -> T:
    """Concatenate the ranks' tensors along the first dimension. See `hvdlite.allgather` for arguments, result and errors.

    The function is differentiable: the gradient of `tensor` is the sum, over the ranks, of the gradients of this rank's rows.

    Args:
        ignore_name_scope: Horovod's argument, which has no effect.

    Examples:
        >>> on_ranks(2, lambda: hvd.allgather(tf.fill([1 + hvd.rank()], hvd.rank())).numpy().tolist())
        [[0, 1, 1], [0, 1, 1]]
    """
    tensors = tensors_of(tensor)

    def run(arrays: list[Array], label: str | None) -> Sequence[Array]:
        return hvdlite.allgather(arrays, label, process_set=process_set)

    def backward(gradients: Tensors) -> Tensors:
        rows = _sum_of_own_rows(gradients, [_rows(each) for each in tensors], process_set)
        return [_reshape_like(each, given) for each, given in zip(rows, tensors, strict=True)]

    given: Any = tensors if is_group(tensor) else tensors[0]
    gathered: T = differentiable(given, run, any_rows, backward, process_set, name)
    return gathered


@as_written
def grouped_allgather(
    tensors: Iterable[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = Everybody,
) -> list[tf.Tensor]:
    """Run `allgather` on several tensors of any dtypes as one operation. Return the list of results. See `allgather`.

    Examples:
        >>> def gathered():
        ...     both = hvd.grouped_allgather([tf.constant([hvd.rank()]), tf.constant([0.5])])
        ...     return [each.numpy().tolist() for each in both]
        >>> on_ranks(2, gathered)
        [[[0, 1], [0.5, 0.5]], [[0, 1], [0.5, 0.5]]]
    """
    return allgather(group_of(tensors), name, ignore_name_scope, process_set)


def _sum_of_own_rows(gathered: Tensors, lengths: Tensors, process_set: ProcessSet) -> Tensors:
    """Sum gathered tensors over the ranks, and keep the rows that this rank contributed.

    Args:
        gathered: Tensors of the shapes that `allgather` returned.
        lengths: The number of this rank's rows (int64 scalars), for each tensor.
        process_set: The ranks that take part.
    """

    def run(arrays: list[Array], label: str | None) -> Sequence[Array]:
        *gradients, own = arrays
        name = None if label is None else f"{label}.rows"
        starts = starts_of_own_rows(own.tolist(), [len(each) for each in gradients], process_set, "gradient", name)
        summed = hvdlite.allreduce(gradients, hvdlite.Sum, label, process_set=process_set)
        return [each[start : start + length].copy() for each, start, length in zip(summed, starts, own, strict=True)]

    def backward(gradients: Tensors, _: Tensors) -> Tensors:
        return allgather(gradients, process_set=process_set)

    return exchange([*gathered, tf.stack(lengths)], run, [any_rows(each) for each in gathered], backward)


def _rows(tensor: tf.Tensor) -> tf.Tensor:
    """Return the number of rows that a tensor contributes to an allgather, as an int64 scalar."""
    return tf.size(tensor, tf.int64) if tensor.shape.rank == 0 else tf.shape(tensor, tf.int64)[0]


def any_rows(tensor: tf.Tensor) -> tf.TensorSpec:
    """Return the spec of a tensor with any number of rows like those of `tensor`."""
    rank = tensor.shape.rank
    shape = tf.TensorShape(None) if rank is None else [None, *tensor.shape[1:]]
    return tf.TensorSpec(shape, tensor.dtype)


def _reshape_like(rows: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    reshaped = tf.reshape(rows, tf.shape(tensor))
    reshaped.set_shape(tensor.shape)
    return reshaped
