"""Gradients of several backward passes, which each rank adds up and which are exchanged once::

    pass 1 ─▶ + ─▶ (the sum so far)        nothing is applied
    pass 2 ─▶ + ─▶ the sum ─▶ exchange ─▶ applied, and the sum is reset

This is for optimizers of tf_keras and TensorFlow 1. Optimizers of Keras 3 accumulate gradients themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet
from hvdlite.adapter.arguments import rank_in
from hvdlite.adapter.options import check_passes
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite_tf.gradients.local_variables import LocalVariables

Exchange = Callable[[list[Any], list[Any]], Sequence[Any]]


class _Aggregation:
    """An accumulator of gradients, in eager code, in a tf.function, and in a graph of TensorFlow 1."""

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Exchange,
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: ProcessSet | None = hvdlite.global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        check_passes(backward_passes_per_step)
        self.backward_passes_per_step = backward_passes_per_step
        self.average_aggregated_gradients = average_aggregated_gradients
        self.sparse_as_dense = sparse_as_dense
        self.locally_aggregated_grads: dict[int, Any] = {}
        """The sums so far, by the position of the gradient in its list."""
        self.counter = _variable(tf.zeros, (), tf.int32)
        """The number of passes in the sums."""
        self._exchange, self._process_set = allreduce_func, process_set
        self.local = LocalVariables(scale_local_gradients, process_set)
        """The variables whose gradients are not exchanged."""

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable out of the exchange; see `hvdlite_tf.gradients.local_variables`."""
        self.local.register(var)

    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add the gradients of one pass to the sums, and exchange the sums if this is the last pass. Every rank calls this.

        Args:
            grads: A dense tensor, a tf.IndexedSlices or None for each variable.
            vars: The variables.

        Returns:
            After the last pass the combined gradients, and `counter` is 0; after other passes the sums so far. An element is
            None if no pass has had a gradient there.

        Raises:
            ArgumentError: A gradient is a tf.IndexedSlices, and `sparse_as_dense` is False.
            HvdliteError: Other ranks have the gradient of a variable for which this rank has had none.
        """
        present = {place: self._dense(gradient) for place, gradient in enumerate(grads) if gradient is not None}
        for place, gradient in present.items():
            if place not in self.locally_aggregated_grads:
                self.locally_aggregated_grads[place] = _variable(tf.zeros, gradient.shape, gradient.dtype)
        # This includes gradients that an earlier pass had and this pass does not have.
        there = sorted(self.locally_aggregated_grads)
        sums = [self.locally_aggregated_grads[place] for place in there]

        def add(*gradients: tf.Tensor) -> list[tf.Tensor]:
            for place, gradient in zip(present, gradients, strict=True):
                self.locally_aggregated_grads[place].assign_add(gradient)
            self.counter.assign_add(1)
            last = tf.equal(self.counter, self.backward_passes_per_step)
            results: list[tf.Tensor] = _choose(last, exchange, lambda: [total.read_value() for total in sums])
            return results

        def exchange() -> list[tf.Tensor]:
            given: list[Any] = [None] * len(grads)
            for place, total in zip(there, sums, strict=True):
                given[place] = total.read_value()
            combined = self.local.exchange_others(lambda shared, own: list(self._exchange(own, shared)), vars, given)
            homeless = [
                getattr(vars[i], "name", i) for i, each in enumerate(combined) if each is not None and i not in there
            ]
            if homeless:
                raise HvdliteError(
                    f"this rank has had no gradient of {', '.join(map(str, homeless))}, and other ranks have one: let every "
                    "rank use the same variables (add 0 times the unused output to the loss)."
                )
            for total in [*sums, self.counter]:
                total.assign(tf.zeros_like(total))
            divisor = self.backward_passes_per_step if self.average_aggregated_gradients else 1
            return [combined[place] / divisor for place in there]

        # In a graph of TensorFlow 1 nothing would order these operations, so they become a function there.
        results = (add if _orders_itself() else tf.function(add, autograph=False))(*present.values())
        found: list[Any] = [None] * len(grads)
        for place, result in zip(there, results, strict=True):
            found[place] = result
        return found

    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients if `compute_gradients` has just exchanged them; otherwise count one more iteration.

        Args:
            apply_grads_closure: A function that applies the gradients that `compute_gradients` returned.
            optimizer: An optimizer whose `iterations` are counted, if it has any.
            *args: The first one is the list of pairs of gradient and variable for the optimizer's `apply_gradients`.
            **kwargs: `global_step` is a variable that is counted too.
        """

        def count() -> Any:
            steps = [getattr(optimizer, "iterations", None), kwargs.get("global_step")]
            return tf.group(*(step.assign_add(tf.ones_like(step)) for step in steps if step is not None))

        def apply() -> Any:
            applied = apply_grads_closure()
            return tf.group(*([applied] if isinstance(applied, tf.Operation | tf.Tensor) else []))

        gradients = [gradient for gradient, _ in args[0] if gradient is not None] if args else []
        with tf.control_dependencies([] if tf.executing_eagerly() else gradients):
            return _choose(tf.equal(self.counter.read_value(), 0), apply, count)

    def settle(self) -> None:
        """Forget the passes since the last update, if some ranks have made more of them than others. Every rank calls this.

        Otherwise the ranks would exchange in different passes from then on.
        """
        name, process_set = "passes since the last update", self._process_set
        made: list[int] = hvdlite.allgather_object(int(self.counter.numpy()), name, process_set=process_set)
        if len(set(made)) == 1:
            return
        for total in [*self.locally_aggregated_grads.values(), self.counter]:
            total.assign(tf.zeros_like(total))
        if rank_in(process_set) == 0:
            warnings.warn(
                "hvdlite: some ranks ran out of data between two updates, with backward_passes_per_step="
                f"{self.backward_passes_per_step}: the batches since the last update do not count. Give all ranks the same "
                "number of batches, or multiples of it.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self.sparse_as_dense:
            raise ArgumentError(
                "gradients of embeddings (IndexedSlices) cannot be added up over several passes as they are: pass "
                "sparse_as_dense=True."
            )
        return tf.convert_to_tensor(gradient)


class LocalGradientAggregationHelper(_Aggregation):
    """An accumulator of the gradients of several passes for graphs of TensorFlow 1, eager code and tf.functions.

    Args:
        backward_passes_per_step: The number of passes.
        allreduce_func: The exchange: a function of gradients and their variables that returns the combined gradients.
        sparse_as_dense: Whether tf.IndexedSlices are made dense; if not, they are an error.
        average_aggregated_gradients: Whether the sums are divided by the number of passes.
        rank, optimizer_type, name: Horovod's arguments, which have no effect.
        process_set: The ranks whose number divides the gradients of local variables.
        scale_local_gradients: Whether the gradients of local variables are divided by the number of ranks.

    Raises:
        ArgumentError: `backward_passes_per_step` is less than 1.

    Examples:
        >>> helper = hvd.LocalGradientAggregationHelper(2, lambda gradients, variables: gradients, False, False, 0, "")
        >>> variables = [tf.Variable(0.0)]
        >>> [helper.compute_gradients([tf.constant(1.0)], variables)[0].numpy().item() for step in range(2)]
        [1.0, 2.0]
    """

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Exchange,
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int,
        optimizer_type: str,
        process_set: ProcessSet | None = hvdlite.global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        super().__init__(
            backward_passes_per_step,
            allreduce_func,
            sparse_as_dense,
            average_aggregated_gradients,
            process_set,
            scale_local_gradients,
        )


class LocalGradientAggregationHelperEager(_Aggregation):
    """An accumulator of the gradients of several passes for eager code and tf.functions.

    See `LocalGradientAggregationHelper` for the arguments and errors.

    Examples:
        >>> helper = hvd.LocalGradientAggregationHelperEager(2, lambda gradients, variables: gradients, False, True)
        >>> variables = [tf.Variable(0.0)]
        >>> [helper.compute_gradients([tf.constant(1.0)], variables)[0].numpy().item() for step in range(2)]
        [1.0, 1.0]
    """


def _orders_itself() -> bool:
    """Return whether operations run in the order of the program, as they do in eager code and in functions."""
    return bool(tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function)


def _choose(condition: tf.Tensor, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    if tf.executing_eagerly():
        return yes() if condition else no()
    return tf.cond(condition, yes, no)


def _variable(initial: Callable[..., Any], shape: Any, dtype: tf.DType) -> Any:
    """Make a variable outside of functions; in a graph of TensorFlow 1 it is a local variable, which is not saved."""
    with tf.init_scope():
        if tf.executing_eagerly():
            return tf.Variable(initial(shape, dtype), trainable=False)
        collections = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
        return tf.compat.v1.Variable(initial(shape, dtype), trainable=False, collections=collections, use_resource=True)
