"""Support for programs of TensorFlow 1: graphs, sessions and the optimizers of `tf.compat.v1.train`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvdlite.adapter.options import ExchangeOptions
from hvdlite.errors import ArgumentError, DistributedAlreadyError
from hvdlite_tf.optimizers.summed_passes import SummedPasses
from hvdlite_tf.training.objects import note_out_of_reach
from hvdlite_tf.training.state import broadcast_variables


def distribute_v1(
    optimizer: tf.compat.v1.train.Optimizer,
    options: ExchangeOptions,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    scale_local_gradients: bool = True,
) -> tf.compat.v1.train.Optimizer:
    """Make an optimizer of TensorFlow 1 compute the gradients of all ranks. It is changed and returned.

    Args:
        optimizer: An instance of a subclass of `tf.compat.v1.train.Optimizer`.
        options: How the gradients are exchanged.
        backward_passes_per_step: The number of calls whose gradients each rank adds up; the last of them applies the sum. The
            sums are local variables of the graph, so run ``tf.compat.v1.local_variables_initializer()``, as a MonitoredSession
            does.
        average_aggregated_gradients: Whether the sums are divided by the number of passes.
        scale_local_gradients: Whether the gradients of local variables are divided by the number of ranks.

    Raises:
        ArgumentError: `optimizer` is distributed already, or `backward_passes_per_step` is less than 1.
    """
    if isinstance(optimizer, DistributedV1):
        raise DistributedAlreadyError("this optimizer is distributed already: wrap it once.")
    plain = type(optimizer)
    optimizer.__class__ = type(
        plain.__name__, (DistributedV1, plain), {"__module__": plain.__module__, "__doc__": plain.__doc__}
    )
    optimizer._hvdlite_sync = SummedPasses(
        options, backward_passes_per_step, average_aggregated_gradients, scale_local_gradients
    )
    note_out_of_reach(options.process_set)
    return optimizer


class DistributedV1(tf.compat.v1.train.Optimizer):  # type: ignore[misc]  # mypy does not see TensorFlow
    """The methods that `distribute_v1` adds to an optimizer's class."""

    _hvdlite_sync: SummedPasses

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable out of the exchange; see `hvdlite_tf.gradients.local_variables`."""
        self._hvdlite_sync.local.register(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return the gradients of all ranks with their variables. The arguments are those of the plain optimizer."""
        return self._hvdlite_sync.combine_pairs(super().compute_gradients(*args, **kwargs))

    def apply_gradients(self, grads_and_vars: Iterable[Any], global_step: Any = None, name: str | None = None) -> Any:
        """Apply the gradients that `compute_gradients` returned; of several passes, only the last one applies them."""
        plain = super().apply_gradients

        def apply(pairs: list[tuple[Any, Any]]) -> Any:
            return plain(pairs, global_step=global_step, name=name)

        return self._hvdlite_sync.apply(apply, list(grads_and_vars), self, global_step=global_step)


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return an operation that gives every rank the root's values of all global variables of the default graph.

    Args:
        root_rank: The rank whose values all ranks get.

    Raises:
        ArgumentError: The function is called in eager code, where there are no global variables.

    Examples:
        >>> def start():
        ...     with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ...         variable = tf.compat.v1.get_variable("variable", initializer=hvd.rank())
        ...         session.run(tf.compat.v1.global_variables_initializer())
        ...         session.run(hvd.broadcast_global_variables(root_rank=1))
        ...         return session.run(variable).item()
        >>> on_ranks(2, start)
        [1, 1]
    """
    if tf.executing_eagerly() or tf.inside_function():
        raise ArgumentError(
            "broadcast_global_variables() is for graphs of TensorFlow 1: in eager code there are no global variables. Use "
            "hvd.broadcast_variables(model.weights, root_rank)."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """A hook for a MonitoredSession, which gives every rank the root's values of all global variables of a new session.

    Args:
        root_rank: The rank whose values all ranks get.
        device: Horovod's argument, which has no effect.

    Examples:
        >>> def start():
        ...     with tf.Graph().as_default():
        ...         variable = tf.compat.v1.get_variable("variable", initializer=hvd.rank())
        ...         hook = hvd.BroadcastGlobalVariablesHook(root_rank=1)
        ...         with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
        ...             return session.run(variable).item()
        >>> on_ranks(2, start)
        [1, 1]
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: tf.Operation | None = None

    def begin(self) -> None:
        """Add the broadcast to the graph."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: tf.compat.v1.Session, coord: Any) -> None:
        """Run the broadcast."""
        session.run(self.bcast_op)
