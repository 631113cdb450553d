"""Sums of tf.IndexedSlices, such as the gradients of embeddings: each rank has some rows of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.errors import ArgumentError
from hvdlite.tensors.compression import Compressor
from hvdlite_tf.ops.allgather import allgather
from hvdlite_tf.ops.rank_ops import size_when_it_runs


def allreduce_slices(
    slices: Sequence[tf.IndexedSlices],
    op: ReduceOp,
    name: str | None,
    compression: Compressor,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    algorithm: Any = None,
) -> list[tf.IndexedSlices]:
    """Gather the rows of all ranks. Rows of equal index are not added up: TensorFlow takes them for their sum.

    Args:
        slices: The same number of tf.IndexedSlices on every rank, each with any number of rows. Their dtypes and widths are the
            same on every rank.
        op: Sum or Average.
        name: See `hvdlite.allgather`.
        compression: The compression of the values.
        prescale_factor, postscale_factor: Must be 1.
        process_set: The ranks that take part.
        algorithm: Must be None.

    Returns:
        A tf.IndexedSlices for each of `slices`, with the rows of all ranks.

    Raises:
        ArgumentError: `op` is neither Sum nor Average, or a factor or an algorithm is given.
    """
    refuse_slices(op, prescale_factor, postscale_factor, algorithm)
    pairs = [compression.compress(each.values) for each in slices]
    gathered = allgather(
        [*(values for values, _ in pairs), *(each.indices for each in slices)], name, process_set=process_set
    )
    values = [compression.decompress(rows, context) for rows, (_, context) in zip(gathered, pairs, strict=False)]
    if op is hvdlite.Average:
        values = [_divide(rows, size_when_it_runs(process_set)) for rows in values]
    return [
        tf.IndexedSlices(rows, indices, each.dense_shape)
        for rows, indices, each in zip(values, gathered[len(slices) :], slices, strict=True)
    ]


def refuse_slices(op: ReduceOp, prescale_factor: float, postscale_factor: float, algorithm: Any = None) -> None:
    """Raise ArgumentError unless tf.IndexedSlices can be reduced with these arguments of `allreduce_slices`."""
    if op not in (hvdlite.Sum, hvdlite.Average):
        raise ArgumentError(f"op={op!r}: tf.IndexedSlices are reduced by Sum or Average; use tf.convert_to_tensor(x).")
    if (prescale_factor, postscale_factor, algorithm) != (1.0, 1.0, None):
        raise ArgumentError(
            f"prescale_factor={prescale_factor}, postscale_factor={postscale_factor}, algorithm={algorithm!r}: "
            "tf.IndexedSlices are gathered as they are; scale their values, or use tf.convert_to_tensor(x)."
        )


def _divide(values: tf.Tensor, size: Any) -> tf.Tensor:
    """Divide values by a number of ranks. The quotients of integers are floats.

    Rows of equal index are added up later, so rounded quotients would give a wrong sum.
    """
    if values.dtype.is_integer:
        values = tf.cast(values, tf.float64 if values.dtype.size > 2 else tf.float32)  # the dtypes of TensorFlow's `/`
    return values / tf.cast(size, values.dtype)
