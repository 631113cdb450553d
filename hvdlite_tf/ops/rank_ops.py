"""Ranks and sizes as tensors, whose values are known when a graph runs, so that one graph serves jobs of any size."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

import hvdlite
from hvdlite.adapter.arguments import size_of
from hvdlite.api import world
from hvdlite.errors import HvdliteError
from hvdlite.protocols import Array
from hvdlite.ranks.process_set import ProcessSet
from hvdlite_tf.ops.ordered import as_written, is_built_for_a_session


@as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks in a process set at the time when the graph runs.

    Args:
        process_set_id: The number of the set; 0 means all ranks.
        name: The name of the operation in the graph.

    Returns:
        An int32 scalar.

    Raises:
        NotInitializedError: `init` has not been called.
        ArgumentError: There is no such process set.
        tf.errors.OpError: An error was seen when a graph ran; the text is that of hvdlite's error.

    Examples:
        >>> on_ranks(2, lambda: hvd.size_op().numpy().item())
        [2, 2]
    """
    return _when_it_runs(lambda: len(world("size_op()").groups.ranks_of(process_set_id)), name)


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return 1 if this process is in a process set at the time when the graph runs, otherwise 0. See `size_op`.

    Examples:
        >>> on_ranks(3, lambda: hvd.process_set_included_op(hvd.add_process_set([0, 2]).process_set_id).numpy().item())
        [1, 0, 1]
    """
    return _when_it_runs(
        lambda: hvdlite.rank() in world("process_set_included_op()").groups.ranks_of(process_set_id), name
    )


@as_written
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return the number of ranks on this host at the time when the graph runs, as an int32 scalar. See `size_op`.

    Examples:
        >>> on_ranks(3, lambda: hvd.local_size_op().numpy().item(), hosts=[0, 0, 1])
        [2, 2, 1]
    """
    return _when_it_runs(hvdlite.local_size, name)


@as_written
def rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's rank in the job at the time when the graph runs, as an int32 scalar. See `size_op`.

    Examples:
        >>> on_ranks(2, lambda: hvd.rank_op().numpy().item())
        [0, 1]
    """
    return _when_it_runs(hvdlite.rank, name)


@as_written
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return this process's number on its host at the time when the graph runs, as an int32 scalar. See `size_op`.

    Examples:
        >>> on_ranks(3, lambda: hvd.local_rank_op().numpy().item(), hosts=[0, 0, 1])
        [0, 1, 0]
    """
    return _when_it_runs(hvdlite.local_rank, name)


def size_when_it_runs(process_set: ProcessSet | None) -> Any:
    """Return the size of a process set: a tensor in a tf.function, because it may run again in a job of another size."""
    if tf.executing_eagerly() or is_built_for_a_session() or size_of(process_set) == 1:
        check_still_alone(process_set)
        return size_of(process_set)
    return _when_it_runs(lambda: size_of(process_set), None)


def check_size(traced: int, process_set: ProcessSet | None) -> None:
    """Raise HvdliteError if a function that was traced for `traced` ranks runs in a process set of another size.

    This happens if the program called `shutdown` and `init` in between, and the new job has another size.
    """
    size = size_of(process_set)
    if size != traced:
        what = ", and exchanges nothing" if traced == 1 else ""
        raise HvdliteError(
            f"this function was traced in a job of {'one rank' if traced == 1 else f'{traced} ranks'}{what}; the number of "
            f"ranks is {size} now. Make the tf.function (or compile the model) anew after init()."
        )


def check_still_alone(process_set: ProcessSet | None) -> None:
    """Add a check to a tf.function that is traced on a single rank, and so exchanges nothing.

    When the function runs in a larger job, after `shutdown` and `init`, it raises a `tf.errors.OpError` with the text of
    `check_size`. The check does nothing in eager code and in graphs for a session.
    """
    if tf.executing_eagerly() or is_built_for_a_session() or size_of(process_set) > 1:
        return
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):  # XLA calls nothing of Python
        return

    def check() -> int:
        check_size(1, process_set)
        return 1

    _when_it_runs(check, None)


def _when_it_runs(number: Callable[[], int], name: str | None) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(number(), tf.int32, name=name)
    context = contextvars.copy_context()  # TensorFlow's threads do not have the context of the program's thread

    def run() -> Array:
        return np.asarray(context.copy().run(number), np.int32)

    result = tf.numpy_function(run, [], tf.int32, name=name)
    result.set_shape(())
    return result
