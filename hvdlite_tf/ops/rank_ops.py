"""Who takes part, as tensors: known when a graph runs, not when it is built, so that one graph serves jobs of any size."""

from __future__ import annotations

import contextvars
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite.api import world
from hvdlite.protocols import Array
from hvdlite_tf.ops.ordered import as_written


@as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks in a process set, when it runs.

    Args:
        process_set_id: The number of the set; 0 for all ranks.
        name: Of the operation in the graph.

    Returns:
        An int32 scalar.

    Raises:
        NotInitializedError: Before `init`. (This and others are TensorFlow's in a graph, with their text.)
        ArgumentError: There is no such process set.
    """
    return _when_it_runs(lambda: len(world("size_op()").ranks_of(process_set_id)), name)


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Whether this process is in a process set, when it runs: an int32 scalar, 1 or 0. Arguments as in `size_op`."""
    return _when_it_runs(lambda: hvdlite.rank() in world("process_set_included_op()").ranks_of(process_set_id), name)


@as_written
def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of ranks on this host, when it runs: an int32 scalar. Arguments as in `size_op`."""
    return _when_it_runs(hvdlite.local_size, name)


@as_written
def rank_op(name: str | None = None) -> tf.Tensor:
    """This process's rank in the job, when it runs: an int32 scalar. Arguments as in `size_op`."""
    return _when_it_runs(hvdlite.rank, name)


@as_written
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This process's number on its host, when it runs: an int32 scalar. Arguments as in `size_op`."""
    return _when_it_runs(hvdlite.local_rank, name)


def _when_it_runs(number: Callable[[], int], name: str | None) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(number(), tf.int32, name=name)
    context = contextvars.copy_context()  # TensorFlow's threads have none

    def run() -> Array:
        return np.asarray(context.copy().run(number), np.int32)

    result = tf.numpy_function(run, [], tf.int32, name=name)
    result.set_shape(())
    return result
