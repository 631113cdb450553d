"""Calls of Python from TensorFlow, in an order that is the same on every rank.

TensorFlow runs independent operations in any order, in a few threads. Exchanges that wait for other ranks need one order: ranks
that begin with different exchanges would wait for each other for ever. So there are three kinds of calls:

- Eager code calls at once, in the order of the program.
- In a tf.function, every call reads a variable, the token, and writes it. This puts all calls in the order of the program, also
  through nested functions, branches and loops, because TensorFlow orders the users of a variable. Calls in functions that
  several threads of the program run at the same time are not ordered; these calls have names.
- In a graph of TensorFlow 1, a session runs only the parts that it is asked for, so a call must not depend on all that was
  built before it. There each call gets a thread of its own, in which it can wait while other calls begin, and only calls of
  one channel are ordered::

      inputs ─▶ TensorDataset ─▶ MapDataset (one numpy_function, inline) ─▶ DatasetToSingleElement ─▶ outputs
                                                                           └ computes in a thread of its own
"""

from __future__ import annotations

import contextvars
import functools
import re
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.execute import quick_execute
from tensorflow.python.ops.cond_v2 import _CondGradFuncGraph
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.control_flow_util_v2 import CondBranchFuncGraph, WhileBodyFuncGraph, WhileCondFuncGraph
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from tensorflow.python.ops.while_v2 import _WhileBodyGradFuncGraph

from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array
from hvdlite.watchdog.threads import waits_in
from hvdlite_tf.ops import failures

F = TypeVar("F", bound=Callable[..., Any])
Function = Callable[..., Sequence[Array]]

# A thread of the program is in this function while a tf.function runs for it, and calls nothing else while one of our calls
# waits. A session is different: its thread may be about to make another call.
waits_in(quick_execute.__code__)

_TOKEN = tf.TensorSpec((), tf.int64)
_one_token = threading.Lock()
_PARALLEL = re.compile("Parallel|MapAndBatch")
"""What the names of TensorFlow's datasets have that call their function in several threads."""
_LATEST, _NAMES = object(), object()
"""The keys of two collections of a graph: a dict with the latest token of each channel, and the names given so far. TensorFlow
does not write these collections to a file, because the keys are not texts."""


def as_written(function: F) -> F:
    """Return the function with a mark that keeps AutoGraph from translating it, and all functions that it calls."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))


def ordered(
    function: Function, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.TensorSpec], channel: Hashable = ""
) -> list[tf.Tensor]:
    """Call `function` with the inputs as arrays, and return its results as tensors. A graph calls `function` each time it runs.

    Args:
        function: A function of read-only arrays with the dtypes and shapes of `inputs`. It must not keep them, because they lie
            in TensorFlow's memory. It returns arrays that nobody changes afterwards, because TensorFlow may use their memory.
            It runs in the world, and with the context variables, of the code that called `ordered`.
        inputs: Dense tensors; a variable must have been read.
        outputs: The spec of each array that `function` returns, with the dimensions that are known.
        channel: In a graph of TensorFlow 1, calls of one channel run in the order in which they were made, and a call needs all
            earlier calls of its channel; calls of different channels run in any order and at the same time. Elsewhere all calls
            are in order, and calls of a channel other than "" do not block functions in other threads of the program.

    Returns:
        A tensor for each of `outputs`, with its dtype and static shape.

    Raises:
        ArgumentError: XLA compiles this function.
        Exception: In eager code, any exception of `function`. A graph raises a TensorFlow error with the text of it instead.
    """
    if tf.executing_eagerly():
        with failures.as_shown():
            arrays = function(*(_read_only(tensor.numpy()) for tensor in inputs))
        return [tf.convert_to_tensor(array, spec.dtype) for array, spec in zip(arrays, outputs, strict=True)]
    graph = tf.compat.v1.get_default_graph()
    _refuse_xla(graph)
    if (dataset := _parallel_dataset()) is not None:
        raise ArgumentError(
            f"an exchange with other ranks in a function of tf.data that runs in parallel ({dataset}): its calls have no order "
            "that is the same on every rank. Leave out num_parallel_calls there, or exchange outside of the dataset."
        )
    context = contextvars.copy_context()  # TensorFlow's threads do not have the context of the program's thread

    def call(token: Array, *arrays: Array) -> list[Array]:
        with failures.remembered():
            results = context.copy().run(function, *map(_read_only, arrays))
        return [np.asarray(token + 1), *results]

    if is_built_for_a_session():
        results = _in_own_thread(call, [_latest_token(graph, channel), *inputs], [_TOKEN, *outputs])
        _tokens(graph)[channel] = results[0]
    else:
        token = _token_in(graph)
        given = [tf.raw_ops.ReadVariableOp(resource=token, dtype=tf.int64), *inputs]
        # Several functions, in threads of the program, may make calls with names at the same time.
        called = _in_own_thread if channel else _in_thread_of_tensorflow
        results = called(call, given, [_TOKEN, *outputs])
        tf.raw_ops.AssignVariableOp(resource=token, value=results[0])
    for result, spec in zip(results[1:], outputs, strict=True):
        result.set_shape(spec.shape)
    return list(results[1:])


def _refuse_xla(graph: tf.Graph) -> None:
    if GraphOrParentsInXlaContext(graph):
        raise ArgumentError(
            "XLA cannot compile a function that exchanges tensors with other ranks: pass jit_compile=False to "
            "model.compile() (or to your tf.function)."
        )


@as_written
def _parallel_dataset() -> str | None:
    """Return the class of the dataset whose function is being traced, if several threads will run it; None otherwise.

    A function does not know what it is traced for, so this looks for the constructor of the dataset among the callers.
    """
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_globals.get("__name__", "").startswith("tensorflow.python.data") and "self" in frame.f_locals:
            name = type(frame.f_locals["self"]).__name__
            if _PARALLEL.search(name) and frame.f_locals.get("num_parallel_calls") not in (None, 1):
                return name
    return None


def is_built_for_a_session() -> bool:
    """Return whether the running code builds a graph of TensorFlow 1, or a function within such a graph."""
    with tf.init_scope():
        return not tf.executing_eagerly()


def name_of_call(name: str | None) -> str | None:
    """Return the name by which the ranks match an exchange that is called here; None if they match it by its order.

    Args:
        name: The name that the program gave, or None.

    Returns:
        `name` if there is one. Otherwise, in a graph for a session, a name with the number of exchanges that were built before
        this one, which is the same on all ranks.
    """
    if name is not None or tf.executing_eagerly() or not is_built_for_a_session():
        return name
    with tf.init_scope():
        names = tf.compat.v1.get_default_graph().get_collection_ref(_NAMES)
    names.append(f"graph.{len(names)}")
    return str(names[-1])


def operation_of(results: Sequence[tf.Tensor]) -> tf.Operation | None:
    """Return what a public function returns that is called for its effect only.

    Args:
        results: The tensors that the call made.

    Returns:
        In a graph for a session, an operation that makes them, for the session to run. None in eager code, which has made them
        already, and in functions, which run all calls.
    """
    return None if tf.executing_eagerly() or tf.inside_function() else tf.group(*results)


def _read_only(given: Any) -> Array:
    array = np.asarray(given)  # TensorFlow gives scalars of NumPy for tensors without dimensions
    array.flags.writeable = False
    return array


def _order_token() -> tf.Variable:
    """Return the token: the one variable of the process that every call in a tf.function reads and then writes."""
    with _one_token:
        return _make_token()


class _Token(ResourceVariable):  # type: ignore[misc]  # mypy does not see TensorFlow
    """A variable that refuses to be used in what XLA compiles.

    A function that was traced before is not traced again when a function that XLA compiles calls it. But TensorFlow asks each
    variable of the function whether it is trainable then.
    """

    @property
    def trainable(self) -> bool:
        """False."""
        _refuse_xla(tf.compat.v1.get_default_graph())
        return False


@functools.cache
def _make_token() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        # Not a tf.Variable, because in the scope of a strategy that would be a distributed variable.
        token = ResourceVariable(0, dtype=tf.int64, trainable=False, name="hvdlite_order")
        token.__class__ = _Token
        return token


def _token_in(graph: Any) -> tf.Tensor:
    """Return the handle of the token, for operations of a graph.

    The handle is the same within a graph and the functions that it calls, so that TensorFlow orders them. The graph of the
    gradient of a loop or branch cannot capture a variable that no graph around it has captured, but it can capture what is in
    the graph around it. So the outer graph captures the handle first, and the gradient captures the outer graph's handle.
    """
    if _is_in_gradient_of_control_flow(graph):
        handle = _token_in(graph.outer_graph)
    else:
        handle = _order_token().handle
        graph.watch_variable(_order_token())
    captured: tf.Tensor = graph.capture(handle)
    return captured


def _is_in_gradient_of_control_flow(graph: Any) -> bool:
    """Return whether a graph belongs to the gradient of a loop or branch, or to a loop or branch within such a gradient."""
    while isinstance(graph, CondBranchFuncGraph | WhileCondFuncGraph | WhileBodyFuncGraph):
        if isinstance(graph, _CondGradFuncGraph | _WhileBodyGradFuncGraph):
            return True
        graph = graph.outer_graph
    return False


def _tokens(graph: tf.Graph) -> dict[Hashable, tf.Tensor]:
    found = graph.get_collection_ref(_LATEST)
    if not found:
        found.append({})
    tokens: dict[Hashable, tf.Tensor] = found[0]
    return tokens


def _latest_token(graph: tf.Graph, channel: Hashable) -> tf.Tensor:
    """Return the token that the latest call of a channel returns; the next call waits for it."""
    token = _tokens(graph).get(channel)
    return tf.constant(0, tf.int64) if token is None or token.graph is not graph else token


def _in_thread_of_tensorflow(
    call: Function, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.TensorSpec]
) -> Sequence[tf.Tensor]:
    """Call `tf.numpy_function`, which runs in one of the few threads that TensorFlow has for operations."""
    results: Sequence[tf.Tensor] = tf.numpy_function(
        call, inputs, [spec.dtype for spec in outputs], name="hvdlite_exchange"
    )
    return results


def _in_own_thread(
    call: Function, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.TensorSpec]
) -> Sequence[tf.Tensor]:
    """Call `tf.numpy_function` in a way that occupies none of the threads that TensorFlow has for operations.

    These threads are few. If all of them waited, on each rank for other exchanges, the ranks would wait for ever. The kernel of
    DatasetToSingleElement computes in a thread of its own, and a function that is mapped without inter-op parallelism runs in
    that thread (seen in TensorFlow 2.21, core/kernels/data/dataset_ops.cc and map_dataset_op.cc).
    """
    signature = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
    dtypes, shapes = [spec.dtype for spec in outputs], [spec.shape for spec in outputs]

    @tf.function(input_signature=signature, autograph=False)  # type: ignore[untyped-decorator]
    def body(*tensors: tf.Tensor) -> Any:
        return tf.numpy_function(call, tensors, dtypes, name="hvdlite_exchange")

    elements = tf.raw_ops.TensorDataset(components=list(inputs), output_shapes=[spec.shape for spec in signature])
    mapped = tf.raw_ops.MapDataset(
        input_dataset=elements,
        other_arguments=[],
        f=body.get_concrete_function(),
        output_types=dtypes,
        output_shapes=shapes,
        use_inter_op_parallelism=False,
    )
    results: Sequence[tf.Tensor] = tf.raw_ops.DatasetToSingleElement(
        dataset=mapped, output_types=dtypes, output_shapes=shapes
    )
    return results
