"""`join` and `barrier`, in eager code and in graphs."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.arguments import size_of
from hvdlite.protocols import Array
from hvdlite_tf.ops.ordered import as_written, name_of_call, operation_of, ordered
from hvdlite_tf.training.objects import join_eagerly


@as_written
def join(*, process_set: ProcessSet = hvdlite.global_process_set) -> tf.Tensor:
    """Say that this rank has no more data, and take part in the operations of the other ranks until all have joined.

    `hvdlite.join` says what this rank contributes to operations and gradients, and which errors there are. A graph raises a
    `tf.errors.OpError` with their text.

    Args:
        process_set: The ranks whose operations this rank takes part in.

    Returns:
        The rank that joined last, as an int32 scalar; its rank in the job, also with a process set.

    Examples:
        >>> def epoch():
        ...     sums = [hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy().item() for batch in range(1 + hvd.rank())]
        ...     return sums, hvd.join().numpy().item()
        >>> on_ranks(2, epoch)  # rank 1 has one batch more
        [([2.0], 1), ([2.0, 1.0], 1)]
    """

    def run() -> list[Array]:
        return [np.asarray(join_eagerly(process_set=process_set), np.int32)]

    size_of(process_set)  # an error is raised here, also while a graph is built
    return ordered(run, [], [tf.TensorSpec((), tf.int32)], channel="join")[0]


@as_written
def barrier(name: str | None = None, *, process_set: ProcessSet = hvdlite.global_process_set) -> tf.Operation | None:
    """Wait until every rank has called this function. See `hvdlite.barrier` for arguments and errors.

    Returns:
        In a graph for a session, the operation that waits. Otherwise None: eager code has waited, and a tf.function waits when
        it runs.

    Examples:
        >>> on_ranks(2, hvd.barrier)
        [None, None]
    """
    label = name_of_call(name)

    def run() -> list[Array]:
        hvdlite.barrier(label, process_set=process_set)
        return [np.asarray(True)]

    size_of(process_set)  # an error is raised here, also while a graph is built
    return operation_of(ordered(run, [], [tf.TensorSpec((), tf.bool)], channel=label or ""))
