"""reducescatter in its forms.

The names, and the order and defaults of the arguments, are Horovod's. Works eagerly, in a tf.function and in a graph for a
session; differentiable for Sum and Average. Its gradient puts the ranks' rows together again, and the gradient of that is a
reducescatter.
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
    """Reduce a tensor over the ranks, and keep this rank's share of the rows. Differentiable for Sum and Average.

    Args:
        tensor: At least 1-d, of the same shape and dtype on every rank; or a list of tensors. Where the ranks do not divide the
            first dimension, the first ranks get one row more.
        device_dense: As in `allreduce`.
        compression: As in `allreduce`.
        op: Sum, Average, Min, Max or Product.
        name: As in `allreduce`.
        process_set: As in `allreduce`.
        ignore_name_scope: As in `allreduce`.
        prescale_factor: As in `allreduce`.
        postscale_factor: As in `allreduce`.

    Returns:
        This rank's rows of the reduced tensor.

    Raises:
        As `allreduce`.
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
        if not tensor.shape.rank:  # unknown, or refused when it runs
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
    """`reducescatter` of several tensors at once. Arguments as there; returns a list."""
    group: list[Any] = group_of(tensors)
    options = factors(prescale_factor, postscale_factor, process_set)
    return reducescatter(group, device_dense, compression, op, **options)


def _rows_together(shares: Tensors, wholes: Tensors, process_set: ProcessSet) -> Tensors:
    """The ranks' shares of the rows of tensors that are like `wholes`, put together."""

    def run(arrays: list[Array], label: str | None) -> Sequence[Array]:
        *rows, lengths = arrays
        # Each rank's rows are put where they belong, and added: so those of a rank that has joined since are 0.
        placed = [_place(*pair, process_set) for pair in zip(rows, lengths.tolist(), strict=True)]
        return hvdlite.allreduce(placed, hvdlite.Sum, label, process_set=process_set)

    def backward(gradients: Tensors, _: Tensors) -> Tensors:
        return reducescatter(gradients, op=hvdlite.Sum, process_set=process_set)

    lengths = tf.stack([tf.shape(whole, tf.int64)[0] for whole in wholes])
    # With compression, what was scattered has another dtype than the tensor that was given.
    specs = [tf.TensorSpec(whole.shape, share.dtype) for whole, share in zip(wholes, shares, strict=True)]
    return exchange([*shares, lengths], run, specs, backward)


def _place(rows: Array, length: int, process_set: ProcessSet) -> Array:
    """This rank's share of the rows of a tensor of `length` rows, among zeros."""
    start, stop = rows_of_share(length, process_set)
    placed = np.zeros((length, *rows.shape[1:]), rows.dtype)
    placed[start:stop] = rows
    return placed
