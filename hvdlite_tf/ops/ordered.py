"""Calls of Python from TensorFlow, in an order that is the same on every rank.

TensorFlow runs what does not depend on each other in any order, in a few threads. Exchanges that wait for other ranks must not
be left to that: ranks that begin with different ones hold each other up for ever. So there are three ways to call:

- eager code calls at once, in the order of the program;
- in a tf.function, every call reads a variable, the token, and writes it, which puts all calls in the order of the program;
  through nested functions, branches and loops too, which TensorFlow orders for variables that they have in common. Functions
  that several threads of the program run at once are not put in order; what they call has names;
- in a graph of TensorFlow 1, a session runs the parts that it is asked for, and nothing may be tied to what was built before.
  There each call gets a thread of its own, so that it may wait without keeping others from beginning, and only calls of one
  channel are put in order::

      inputs ─▶ TensorDataset ─▶ MapDataset (one numpy_function, inline) ─▶ DatasetToSingleElement ─▶ outputs
                                                                           └ computes in a thread of its own
"""

from __future__ import annotations

import contextvars
import functools
import threading
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

F = TypeVar("F", bound=Callable[..., Any])
Function = Callable[..., Sequence[Array]]

# Where a thread of the program is while a tf.function runs for it, which calls nothing more as long as one call of ours waits.
# Not so a session: it may be on the way to another call.
waits_in(quick_execute.__code__)

_TOKEN = tf.TensorSpec((), tf.int64)
_one_token = threading.Lock()
_LATEST, _NAMES = object(), object()
"""The keys of a graph's collections that have, in a dict, the token of each channel; and the names given so far. They are no
text, so that nobody writes these collections to a file."""


def ordered(
    function: Function, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.TensorSpec], channel: Hashable = ""
) -> list[tf.Tensor]:
    """Call `function` with the inputs as arrays, and return what it returns as tensors; in a graph, whenever that runs.

    Args:
        function: Gets read-only arrays of the dtypes and shapes of `inputs`, which it must not keep, for they lie in
            TensorFlow's own memory. Returns arrays, which TensorFlow may hold without a copy: nobody may write into them any
            more. It runs in the world, and with all context variables, of the code that called `ordered`.
        inputs: Dense tensors. Those of variables must have been read.
        outputs: Dtype and shape of each array that `function` returns, as far as they are known.
        channel: In a graph of TensorFlow 1, calls of one channel run in the order in which they were made, each with all that
            were made before it; those of different channels in any order and at once. Elsewhere all calls are in order, and
            those of a channel that is not "" do not keep functions in other threads of the program from running.

    Returns:
        A tensor for each of `outputs`, with its dtype and static shape.

    Raises:
        ArgumentError: XLA compiles this function.
        Exception: In eager code, whatever `function` raises. In a graph that becomes TensorFlow's error, with its text.
    """
    if tf.executing_eagerly():
        arrays = function(*(_read_only(tensor.numpy()) for tensor in inputs))
        return [tf.convert_to_tensor(array, spec.dtype) for array, spec in zip(arrays, outputs, strict=True)]
    graph = tf.compat.v1.get_default_graph()
    if GraphOrParentsInXlaContext(graph):
        raise ArgumentError(
            "XLA cannot compile a function that exchanges tensors with other ranks: pass jit_compile=False to "
            "model.compile() (or to your tf.function)."
        )
    context = contextvars.copy_context()  # TensorFlow's threads have none

    def call(token: Array, *arrays: Array) -> list[Array]:
        results = context.copy().run(function, *map(_read_only, arrays))
        return [np.asarray(token + 1), *results]

    if is_built_for_a_session():
        results = _in_own_thread(call, [_latest_token(graph, channel), *inputs], [_TOKEN, *outputs])
        _tokens(graph)[channel] = results[0]
    else:
        token = _token_in(graph)
        given = [tf.raw_ops.ReadVariableOp(resource=token, dtype=tf.int64), *inputs]
        # What has a name may be called by several functions at once, in threads of the program.
        called = _in_own_thread if channel else _in_thread_of_tensorflow
        results = called(call, given, [_TOKEN, *outputs])
        tf.raw_ops.AssignVariableOp(resource=token, value=results[0])
    for result, spec in zip(results[1:], outputs, strict=True):
        result.set_shape(spec.shape)
    return list(results[1:])


def is_built_for_a_session() -> bool:
    """Whether the code that runs builds a graph of TensorFlow 1, or a function within one."""
    with tf.init_scope():
        return not tf.executing_eagerly()


def name_of_call(name: str | None) -> str | None:
    """The name by which an exchange that is called here finds those of the other ranks; None where the order tells.

    Args:
        name: What the program calls it, if it does.

    Returns:
        `name` if there is one. In a graph for a session, else, one that says how many were built before it, which is the
        same on all ranks.
    """
    if name is not None or tf.executing_eagerly() or not is_built_for_a_session():
        return name
    with tf.init_scope():
        names = tf.compat.v1.get_default_graph().get_collection_ref(_NAMES)
    names.append(f"graph.{len(names)}")
    return str(names[-1])


def operation_of(results: Sequence[tf.Tensor]) -> tf.Operation | None:
    """What a call returns whose results matter to nobody.

    Returns:
        In a graph for a session, the operation that makes them; None in eager code, in which they are there, and in functions,
        which run all calls, returned or not.
    """
    return None if tf.executing_eagerly() or tf.inside_function() else tf.group(*results)


def as_written(function: F) -> F:
    """Let AutoGraph leave a function alone, which translates whatever a tf.function calls, with all that it calls in turn."""
    return cast(F, tf.autograph.experimental.do_not_convert(function))


def _read_only(given: Any) -> Array:
    array = np.asarray(given)  # TensorFlow gives scalars of NumPy for tensors without dimensions
    array.flags.writeable = False
    return array


def _order_token() -> tf.Variable:
    """The variable that every call in a tf.function reads and then writes. One for the process: its value does not matter."""
    with _one_token:
        return _make_token()


@functools.cache
def _make_token() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        # Not tf.Variable: a strategy in whose scope this is would make something else of it.
        return ResourceVariable(0, dtype=tf.int64, trainable=False, name="hvdlite_order")


def _token_in(graph: Any) -> tf.Tensor:
    """The handle of that variable, for operations of a graph.

    The same within a graph, also for functions that it calls, so that TensorFlow puts them in order. TensorFlow's gradient of a
    loop or branch cannot have a variable that it is the first to see, but may have what is in the graph around it. So the
    handle comes from there into it, and from it into the loops and branches in it.
    """
    inherits = _is_in_gradient_of_control_flow(graph)
    handle: tf.Tensor = graph.capture(_token_in(graph.outer_graph) if inherits else _order_token().handle)
    return handle


def _is_in_gradient_of_control_flow(graph: Any) -> bool:
    """Whether a graph is of the gradient of a loop or branch, or of a loop or branch in one."""
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
    """What the latest call of a channel returns, for the next one to wait for."""
    token = _tokens(graph).get(channel)
    return tf.constant(0, tf.int64) if token is None or token.graph is not graph else token


def _in_thread_of_tensorflow(
    call: Function, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.TensorSpec]
) -> Sequence[tf.Tensor]:
    """`tf.numpy_function`, in one of the few threads that TensorFlow has for operations."""
    results: Sequence[tf.Tensor] = tf.numpy_function(call, inputs, [spec.dtype for spec in outputs])
    return results


def _in_own_thread(
    call: Function, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.TensorSpec]
) -> Sequence[tf.Tensor]:
    """`tf.numpy_function` that occupies none of the threads which TensorFlow has for operations.

    They are few, and ranks whose threads all wait, each rank's for other exchanges, would wait for ever. The kernel of
    DatasetToSingleElement computes in a thread that it has for itself, and a function mapped without inter-op parallelism runs
    there (seen in TensorFlow 2.21, core/kernels/data/dataset_ops.cc and map_dataset_op.cc).
    """
    signature = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
    dtypes, shapes = [spec.dtype for spec in outputs], [spec.shape for spec in outputs]

    @tf.function(input_signature=signature, autograph=False)  # type: ignore[untyped-decorator]
    def body(*tensors: tf.Tensor) -> Any:
        return tf.numpy_function(call, tensors, dtypes)

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
