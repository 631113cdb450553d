"""Waits for the other ranks."""

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
    """Say that this rank has run out of data, and take part in what the others still do until all have said so.

    It adds nothing to operations, and an average of gradients is one of the ranks that have data: see `hvdlite.join`.

    Args:
        process_set: The ranks that take part.

    Returns:
        The rank that joined last, as an int32 scalar; its rank in the job, with a process set too.

    Raises:
        HvdliteError: As `hvdlite.join`.
        tf.errors.OpError: As in `allreduce`.
    """

    def run() -> list[Array]:
        return [np.asarray(join_eagerly(process_set=process_set), np.int32)]

    size_of(process_set)  # raises here already, in graphs too
    return ordered(run, [], [tf.TensorSpec((), tf.int32)], channel="join")[0]


@as_written
def barrier(name: str | None = None, *, process_set: ProcessSet = hvdlite.global_process_set) -> tf.Operation | None:
    """Go on when every rank has come here.

    Args:
        name: As in `allreduce`.
        process_set: The ranks that take part.

    Returns:
        In a graph for a session, the operation that does it. Else None: in eager code it is done, and a tf.function does it.

    Raises:
        MismatchError: The ranks' calls do not belong together; raised on all of them.
        tf.errors.OpError: As in `allreduce`.
    """
    label = name_of_call(name)

    def run() -> list[Array]:
        hvdlite.barrier(label, process_set=process_set)
        return [np.asarray(True)]

    size_of(process_set)  # raises here already, in graphs too
    return operation_of(ordered(run, [], [tf.TensorSpec((), tf.bool)], channel=label or ""))
