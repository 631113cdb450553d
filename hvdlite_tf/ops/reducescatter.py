"""Reducescatter of one tensor and of a group of tensors, with gradients.

The gradient puts the ranks' rows together again, and the gradient of that is a reducescatter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.adapter.arguments import Everybody, check_linear, factors, group_of, rank_in, size_of
from hvdlite.adapter.rows import rows_of_share
from hvdlite.operations.reducescatter import split_rows
from hvdlite.protocols import Array
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_tf.ops.arguments import is_group, tensors_of
from hvdlite_tf.ops.differentiable import Tensors, differentiable, exchange
from hvdlite_tf.ops.ordered import as_written
from hvdlite_tf.ops.rank_ops import check_size

T = TypeVar("T")


@as_written
def reducescatter(
    tensor: T,
    device_dense: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp = hvdlite.Average,
    name: str | None = None,
    process_set: ProcessSet = Everybody,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> T:
    """Reduce a tensor over the ranks and keep this rank's rows. See `hvdlite.reducescatter` for arguments, result and errors.

    The function is differentiable for Sum and Average: the gradient of `tensor` is the gradients of all ranks' rows, put
    together, multiplied by the factors, and divided by the number of ranks for Average.

    Args:
        device_dense, ignore_name_scope: Horovod's arguments, which have no effect.
        compression: The dtype in which the ranks exchange the tensor, and its gradient; see `Compression`.

    Examples:
        >>> on_ranks(2, lambda: hvd.reducescatter(tf.constant([1.0, 2.0]), op=hvd.Sum).numpy().tolist())
        [[2.0], [4.0]]
    """
    options = factors(prescale_factor, postscale_factor, process_set)
    rank, size = rank_in(process_set), size_of(process_set)
    tensors = tensors_of(tensor)

    def run(arrays: list[Array], label: str | None) -> Sequence[Array]:
        check_size(size, process_set)
        return hvdlite.reducescatter(arrays, op, label, **options)

    def backward(gradients: Tensors) -> Tensors:
        check_linear("reducescatter", op)
        factor = prescale_factor * postscale_factor / (size if op is hvdlite.Average else 1)
        together = _rows_together(gradients, tensors, process_set)
        return [gradient * tf.constant(factor, gradient.dtype) for gradient in together]

    def own_rows(tensor: tf.Tensor) -> tf.TensorSpec:
        if not tensor.shape.rank:  # the rank is unknown, or 0, which is refused when the operation runs
            return tf.TensorSpec(None, tensor.dtype)
        rows = tensor.shape[0]
        own = None if rows is None else split_rows(rows, size)[rank]
        return tf.TensorSpec([own, *tensor.shape[1:]], tensor.dtype)

    given: Any = tensors if is_group(tensor) else tensors[0]
    rows: T = differentiable(given, run, own_rows, backward, process_set, name, compression)
    return rows


@as_written
def grouped_reducescatter(
    tensors: Iterable[Any],
    device_dense: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp = hvdlite.Average,
    process_set: ProcessSet = Everybody,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Run `reducescatter` on several tensors of any dtypes as one operation, and return the list of results.

    Examples:
        >>> def sums():
        ...     both = hvd.grouped_reducescatter([tf.constant([1.0, 2.0]), tf.constant([3, 4])], op=hvd.Sum)
        ...     return [each.numpy().tolist() for each in both]
        >>> on_ranks(2, sums)
        [[[2.0], [6]], [[4.0], [8]]]
    """
    group: list[Any] = group_of(tensors)
    options = factors(prescale_factor, postscale_factor, process_set)
    return reducescatter(group, device_dense, compression, op, **options)


def _rows_together(shares: Tensors, wholes: Tensors, process_set: ProcessSet) -> Tensors:
    """Return tensors of the shapes of `wholes`, put together from the rows that each rank has in `shares`."""

    def run(arrays: list[Array], label: str | None) -> Sequence[Array]:
        *rows, lengths = arrays
        # An allreduce of rows among zeros, instead of an allgather: the rows of a rank that has joined since are 0.
        placed = [_place(*pair, process_set) for pair in zip(rows, lengths.tolist(), strict=True)]
        return hvdlite.allreduce(placed, hvdlite.Sum, label, process_set=process_set)

    def backward(gradients: Tensors, _: Tensors) -> Tensors:
        return reducescatter(gradients, op=hvdlite.Sum, process_set=process_set)

    lengths = tf.stack([tf.shape(whole, tf.int64)[0] for whole in wholes])
    # With compression, the shares have another dtype than the tensors that the program passed.
    specs = [tf.TensorSpec(whole.shape, share.dtype) for whole, share in zip(wholes, shares, strict=True)]
    return exchange([*shares, lengths], run, specs, backward)


def _place(rows: Array, length: int, process_set: ProcessSet) -> Array:
    """Return an array of `length` rows: this rank's share of them is `rows`, and the others are 0."""
    start, stop = rows_of_share(length, process_set)
    placed = np.zeros((length, *rows.shape[1:]), rows.dtype)
    placed[start:stop] = rows
    return placed
