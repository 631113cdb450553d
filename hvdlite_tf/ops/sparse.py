"""Sums of tensors of which each rank has some rows: tf.IndexedSlices, the gradients of embeddings."""

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
    """The rows of all ranks, put together. Rows of equal index stay apart, as TensorFlow leaves them: they count as their sum.

    Args:
        slices: Rows of any number, the same number of tensors with rows of the same dtype and width on every rank.
        op: Sum or Average.
        name: As in `allreduce`.
        compression: How the values travel.
        prescale_factor, postscale_factor: 1.
        process_set: The ranks that take part.
        algorithm: None.

    Returns:
        As many tf.IndexedSlices.

    Raises:
        ArgumentError: Another `op`, a factor or an algorithm is asked for.
    """
    if op not in (hvdlite.Sum, hvdlite.Average):
        raise ArgumentError(f"op={op!r}: tf.IndexedSlices are reduced by Sum or Average; use tf.convert_to_tensor(x).")
    if (prescale_factor, postscale_factor, algorithm) != (1.0, 1.0, None):
        raise ArgumentError(
            f"prescale_factor={prescale_factor}, postscale_factor={postscale_factor}, algorithm={algorithm!r}: "
            "tf.IndexedSlices are gathered as they are; scale their values, or use tf.convert_to_tensor(x)."
        )
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


def _divide(values: tf.Tensor, size: Any) -> tf.Tensor:
    """Averages of whole numbers are rounded down, as those of dense tensors are."""
    divisor = tf.cast(size, values.dtype)
    return values // divisor if values.dtype.is_integer else values / divisor
