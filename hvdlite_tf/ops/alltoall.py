"""Alltoall: each rank sends some rows to each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.arguments import Everybody, size_of
from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array
from hvdlite_tf.ops.allgather import any_rows
from hvdlite_tf.ops.arguments import as_tensor, is_group
from hvdlite_tf.ops.differentiable import Tensors, exchange
from hvdlite_tf.ops.ordered import as_written
from hvdlite_tf.ops.rank_ops import check_size


@as_written
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = Everybody,
) -> Any:
    """Send some rows to each rank, and receive some from each. See `hvdlite.alltoall` for arguments, result and errors.

    The function is differentiable: an alltoall sends the gradients of the rows back to the rows' senders. It takes one tensor,
    not a list.

    Args:
        ignore_name_scope: Horovod's argument, which has no effect.

    Examples:
        >>> on_ranks(2, lambda: hvd.alltoall(tf.constant([10, 11]) + 10 * hvd.rank()).numpy().tolist())
        [[10, 20], [11, 21]]
    """
    if is_group(tensor):
        raise ArgumentError(f"alltoall takes one tensor; got a {type(tensor).__name__}. hvdlite.alltoall takes lists.")
    size = size_of(process_set)

    def run(arrays: list[Array], label: str | None) -> Sequence[Array]:
        check_size(size, process_set)
        rows, *given = arrays
        # The core returns the numbers of received rows only if it gets splits.
        divides = not given and rows.ndim and rows.shape[0] % size == 0
        counts: Any = [rows.shape[0] // size] * size if divides else (given[0] if given else None)
        received: tuple[Array, Array] = hvdlite.alltoall(rows, counts, label, process_set=process_set)
        return received

    def backward(gradients: Tensors, results: Tensors) -> Tensors:
        return [alltoall(gradients[0], results[1], process_set=process_set)[0]]

    given = as_tensor(tensor)
    tensors = [given] if splits is None else [given, as_tensor(splits)]
    rows, received = exchange(tensors, run, [any_rows(given), tf.TensorSpec((size,), tf.int32)], backward, name)
    return rows if splits is None else (rows, received)
