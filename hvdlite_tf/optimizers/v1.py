"""Programs of TensorFlow 1: graphs, sessions and the optimizers of `tf.compat.v1.train`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvdlite.adapter.options import Options
from hvdlite.errors import ArgumentError, DistributedAlreadyError
from hvdlite_tf.optimizers.summed_passes import SummedPasses
from hvdlite_tf.training.state import broadcast_variables


def distribute_v1(
    optimizer: tf.compat.v1.train.Optimizer,
    options: Options,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    scale_local_gradients: bool = True,
) -> tf.compat.v1.train.Optimizer:
    """Make an optimizer of TensorFlow 1 compute the gradients of all ranks. It is changed and returned.

    Args:
        optimizer: Of any class below `tf.compat.v1.train.Optimizer`.
        options: How gradients are exchanged.
        backward_passes_per_step: Apply the sum of that many gradients, once in as many calls. Sums are local variables of the
            graph: run ``tf.compat.v1.local_variables_initializer()``, as a MonitoredSession does.
        average_aggregated_gradients: Divide the sums by the number of passes.
        scale_local_gradients: Divide the gradients of local variables by the number of ranks.

    Raises:
        ArgumentError: It is distributed already, or fewer than one pass.
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
    return optimizer


class DistributedV1(tf.compat.v1.train.Optimizer):  # type: ignore[misc]  # mypy does not see TensorFlow
    """What `distribute_v1` adds to an optimizer's class."""

    _hvdlite_sync: SummedPasses

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable out of the exchange; see `hvdlite_tf.gradients.local_variables`."""
        self._hvdlite_sync.local.register(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The gradients of all ranks, with their variables. Arguments as the plain optimizer has them."""
        return self._hvdlite_sync.combine_pairs(super().compute_gradients(*args, **kwargs))

    def apply_gradients(self, grads_and_vars: Iterable[Any], global_step: Any = None, name: str | None = None) -> Any:
        """Apply what `compute_gradients` returned, as the plain optimizer does; of several passes in the last one only."""
        plain = super().apply_gradients

        def apply(pairs: list[tuple[Any, Any]]) -> Any:
            return plain(pairs, global_step=global_step, name=name)

        return self._hvdlite_sync.apply(apply, list(grads_and_vars), self, global_step=global_step)


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """An operation that gives every rank the root's values of all global variables of the default graph.

    Args:
        root_rank: Whose values everybody gets.

    Raises:
        ArgumentError: Called in eager code, where no variables are global.
    """
    if tf.executing_eagerly() or tf.inside_function():
        raise ArgumentError(
            "broadcast_global_variables() is for graphs of TensorFlow 1: in eager code there are no global variables. Use "
            "hvd.broadcast_variables(model.weights, root_rank)."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Gives every rank the root's values of all global variables when a session has been made, for a MonitoredSession.

    Args:
        root_rank: Whose values everybody gets.
        device: Horovod's, without effect.
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
        """Broadcast."""
        session.run(self.bcast_op)
