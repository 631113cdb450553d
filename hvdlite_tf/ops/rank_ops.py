"""Who takes part, as tensors: known when a graph runs, not when it is built, so that one graph serves jobs of any size."""

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
from hvdlite.process_set import ProcessSet
from hvdlite.protocols import Array
from hvdlite_tf.ops.ordered import as_written, is_built_for_a_session


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
    return _when_it_runs(lambda: len(world("size_op()").groups.ranks_of(process_set_id)), name)


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Whether this process is in a process set, when it runs: an int32 scalar, 1 or 0. Arguments as in `size_op`."""
    return _when_it_runs(
        lambda: hvdlite.rank() in world("process_set_included_op()").groups.ranks_of(process_set_id), name
    )


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


def size_when_it_runs(process_set: ProcessSet | None) -> Any:
    """The number of ranks in a process set: a tensor in a tf.function, which may run again in a job of another size."""
    if tf.executing_eagerly() or is_built_for_a_session() or size_of(process_set) == 1:
        check_still_alone(process_set)
        return size_of(process_set)
    return _when_it_runs(lambda: size_of(process_set), None)


def check_size(traced: int, process_set: ProcessSet | None) -> None:
    """Raise if a function that was traced for a number of ranks runs among another number.

    Raises:
        HvdliteError: There has been `shutdown` and `init` in between, in a job of another size.
    """
    size = size_of(process_set)
    if size != traced:
        what = ", and exchanges nothing" if traced == 1 else ""
        raise HvdliteError(
            f"this function was traced in a job of {'one rank' if traced == 1 else f'{traced} ranks'}{what}; the number of "
            f"ranks is {size} now. Make the tf.function (or compile the model) anew after init()."
        )


def check_still_alone(process_set: ProcessSet | None) -> None:
    """In a tf.function that is traced on the only rank, and so exchanges nothing: raise when it runs on one of several.

    Raises:
        tf.errors.OpError: With the text of ours, when the function runs after `shutdown` and `init` in a larger job.
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
    context = contextvars.copy_context()  # TensorFlow's threads have none

    def run() -> Array:
        return np.asarray(context.copy().run(number), np.int32)

    result = tf.numpy_function(run, [], tf.int32, name=name)
    result.set_shape(())
    return result
