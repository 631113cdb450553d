"""The one-line wrap: a Keras optimizer that averages gradients over the ranks before it applies them.

The optimizer stays the object that it was; its class becomes a subclass of the same name. Inside of a tf.function the exchange
is one call of Python per step, with its place in the order of all exchanges held by a variable, the token::

    gradients ─▶ bucket memory ─▶ sum over the ranks ─▶ copies ─▶ clipping, weight decay, update, as Keras does them
       token ─▶ (read)         one tf.numpy_function          (written) ─▶ token
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.api import world
from hvdlite.errors import ArgumentError, HvdliteError, UnsupportedTensorError
from hvdlite.protocols import Array
from hvdlite.reducer import Reducer
from hvdlite.world import World
from hvdlite_tf.tensor import ADAPTER, plain_variable

Opt = TypeVar("Opt")


def DistributedOptimizer(
    optimizer: Opt, *, op: ReduceOp = hvdlite.Average, process_set: ProcessSet | None = None
) -> Opt:
    """Make `optimizer` apply the gradients of all ranks. Every rank calls this, with optimizers over the same variables.

    For ``model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)))`` and `fit`, and for loops of your
    own with ``optimizer.apply_gradients``, inside of tf.function or not. Clipping sees the combined gradients; with
    ``gradient_accumulation_steps``, gradients are exchanged once per update. Saved models name the plain optimizer.

    A variable without gradient (None) on every rank is left alone, as Keras does. One that has a gradient on some ranks counts
    as zero on the others in eager code; in a tf.function, and where gradients are accumulated, that is an error on the ranks
    that have none. An error during an exchange in a tf.function comes out as TensorFlow's UnknownError, the text of ours in it.

    Args:
        optimizer: An optimizer of Keras 3, on its TensorFlow backend; it is changed and returned. A LossScaleOptimizer goes
            inside, so that all ranks skip the same steps: ``DistributedOptimizer(LossScaleOptimizer(Adam()))``.
        op: Average or Sum.
        process_set: The ranks that take part; all by default.

    Returns:
        `optimizer`, still an instance of its class, with its state.

    Raises:
        ArgumentError: It is no Keras 3 optimizer on TensorFlow, or is wrapped already; in the first step, another `op`.
        MismatchError: The ranks have different variables. Raised on all of them, in their first step.
    """
    exchange = _GradientExchange(world("DistributedOptimizer()"), op, process_set)
    _check(optimizer)
    keras_optimizer: Any = optimizer
    plain = type(optimizer)
    keras_optimizer.__class__ = type(
        plain.__name__,
        (Distributed, plain),
        # `obj.__class__` is what Keras serializes: saved files and pickles then have no trace of hvdlite, and any process
        # loads them. `type(obj)` and `isinstance` still know better.
        {"__module__": plain.__module__, "__doc__": plain.__doc__, "__class__": property(lambda self: plain)},
    )
    keras_optimizer._hvdlite_exchange = exchange
    return optimizer


class Distributed(keras.optimizers.Optimizer):  # type: ignore[misc]  # mypy does not see Keras
    """What `DistributedOptimizer` adds to an optimizer's class."""

    _hvdlite_exchange: _GradientExchange

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Combine the gradients over the ranks and update the variables with them. Arguments as Keras has them."""
        gradients = list(grads)
        given = None if trainable_variables is None else list(trainable_variables)
        if gradients and given is not None and not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(given)  # as Keras does
        if gradients and self.built:
            variables = self._trainable_variables if given is None else given
            self._check_variables_are_known(variables)
            self._hvdlite_exchange.prepare(self._trainable_variables)
            indices = [self._get_variable_index(variable) for variable in variables]
            if self.gradient_accumulation_steps:
                self._hvdlite_exchange.accumulating = [
                    index for index, gradient in zip(indices, gradients, strict=True) if gradient is not None
                ]
            else:
                gradients = self._hvdlite_exchange.combine(indices, gradients)
        super().apply(gradients, given)

    def _clip_gradients(self, grads: list[Any]) -> Any:
        # With accumulation Keras calls this once per update, on the accumulated gradients.
        if self.gradient_accumulation_steps:
            grads = self._hvdlite_exchange.combine(self._hvdlite_exchange.accumulating, grads)
        return super()._clip_gradients(grads)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None:  # the constructor of LossScaleOptimizer does this
            raise ArgumentError(
                "a LossScaleOptimizer (or compile() of a mixed_float16 model, which makes one) was put around a distributed "
                "optimizer: the ranks would not skip the same steps. Wrap the other way round: "
                "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))."
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled and copied as the plain optimizer: the exchange belongs to this process.
        _, arguments = super().__reduce__()
        return self.__class__._unpickle_model, arguments


class _GradientExchange:
    """The gradients of one optimizer, on one rank."""

    def __init__(self, here: World, op: ReduceOp, process_set: ProcessSet | None) -> None:
        self._world = here
        self._op = op
        self._process_set = process_set
        self._variables: list[tf.Variable] = []
        self._reducer: Reducer
        self.accumulating: list[int] = []
        """Which variables the accumulated gradients belong to."""

    def prepare(self, variables: Sequence[Any]) -> None:
        """Have buckets for the gradients of these variables. Every rank calls this, at each of its steps.

        Not when the optimizer is built: one that was loaded from a file on one rank is built sooner there.
        """
        plain = [plain_variable(variable) for variable in variables]
        if len(plain) == len(self._variables) and all(a is b for a, b in zip(plain, self._variables, strict=True)):
            return
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise UnsupportedTensorError(f"{variable.path} (float8 training) has scales in place of gradients.")
        infos = [ADAPTER.info(variable) for variable in plain]
        outdated = getattr(self, "_reducer", None)
        self._reducer = self._world.reducer(infos, self._op, self._process_set)
        if outdated is not None:
            self._world.release(outdated)
        self._variables = plain

    def combine(self, indices: Sequence[int], gradients: Sequence[Any]) -> list[Any]:
        """The gradients of all ranks.

        Args:
            indices: Which variables `gradients` belong to.
            gradients: Of any shape and dtype that the variables may have, dense or not; None if this rank has none.

        Returns:
            For each of `indices`, a dense tensor of the variable's dtype and shape; None if no rank has a gradient.

        Raises:
            ArgumentError: XLA compiles this function.
            HvdliteError: Other ranks have gradients for which there is no place here.
        """
        dense = [_dense(gradient) for gradient in gradients]
        if not tf.inside_function():
            arrays = self._exchange(indices, [None if tensor is None else tensor.numpy() for tensor in dense])
            return [None if array is None else tf.convert_to_tensor(array) for array in arrays]
        if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ArgumentError(
                "XLA cannot compile a function that exchanges gradients: pass jit_compile=False to model.compile() "
                "(or to your tf.function)."
            )
        present = [(index, tensor) for index, tensor in zip(indices, dense, strict=True) if tensor is not None]
        if not present:
            return dense
        here = [index for index, _ in present]
        variables = [self._variables[index] for index in here]
        token = _order_token()
        outputs = tf.numpy_function(
            lambda _, *arrays: self._exchange(here, arrays),
            [token.read_value(), *(tensor for _, tensor in present)],
            [variable.dtype for variable in variables],
        )
        with tf.control_dependencies(outputs):
            token.assign_add(1)
        for output, variable in zip(outputs, variables, strict=True):
            output.set_shape(variable.shape)
        combined = dict(zip(here, outputs, strict=True))
        return [combined.get(index) for index in indices]

    def _exchange(self, indices: Sequence[int], gradients: Sequence[Array | None]) -> list[Array | None]:
        """`combine` for arrays. They may lie in TensorFlow's own memory, so they are copied and not reduced in place."""
        used = [False] * len(self._variables)
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient is not None:
                self._memory_of(index)[:] = gradient.reshape(-1)
                used[index] = True
        anywhere = self._reducer.exchange(used)
        homeless = set(range(len(anywhere))).difference(indices)
        missing = [self._variables[index].name for index in sorted(homeless) if anywhere[index]]
        if missing:
            raise HvdliteError(
                f"this rank has no gradient of {', '.join(missing)}, and other ranks have one: let every rank use the same "
                "variables (add 0 times the unused output to the loss), or apply the gradients outside of tf.function."
            )
        return [self._result(index) if anywhere[index] else None for index in indices]

    def _result(self, index: int) -> Array:
        # A copy, since TensorFlow may hold on to it, and this memory is overwritten in the next step.
        copy: Array = self._memory_of(index).reshape(self._variables[index].shape).copy()
        return copy

    def _memory_of(self, index: int) -> Array:
        return self._reducer.memory_of(index).view(self._variables[index].dtype.as_numpy_dtype)


@functools.cache
def _order_token() -> tf.Variable:
    """The variable that every exchange in a graph reads and then writes, which puts them in the order of the program.

    TensorFlow orders neither nested functions nor branches that have no variable in common, and threads that wait for exchanges
    of different optimizers on different ranks could use up its pool. One for the process, as a graph may have many optimizers.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="hvdlite_order")


def _dense(gradient: Any) -> Any:
    """Embeddings have gradients for some rows only; the others are zero.

    Rows that were looked up more than once are summed. Keras leaves them apart, so that its Adam squares each part alone.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, gradient.dense_shape[0])


def _check(optimizer: Any) -> None:
    kind = type(optimizer)
    if isinstance(optimizer, Distributed):
        raise ArgumentError("this optimizer is distributed already: wrap it once.")
    if keras.backend.backend() != "tensorflow":
        raise ArgumentError(
            f"hvdlite_tf needs Keras on TensorFlow; its backend is {keras.backend.backend()}. "
            "Set KERAS_BACKEND=tensorflow before Keras is imported."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        hint = " Those of tf_keras (Keras 2) cannot be wrapped." if kind.__module__.startswith("tf_keras") else ""
        raise ArgumentError(
            f"expected an optimizer of Keras 3, such as keras.optimizers.Adam(1e-3); got {kind.__module__}."
            f"{kind.__qualname__}.{hint}"
        )
