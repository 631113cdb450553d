"""The one-line wrap for the optimizers of tf_keras (Keras 2), new and legacy ones.

Both ask a method of theirs for the gradients of all replicas before they clip and apply them; ours asks all ranks as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import Options
from hvdlite.api import world
from hvdlite.errors import ArgumentError, DistributedAlreadyError
from hvdlite_tf.gradients.optimizer_parts import rates_of_variables
from hvdlite_tf.optimizers.summed_passes import SummedPasses


def is_tf_keras(optimizer: Any) -> bool:
    """Whether this is an optimizer of tf_keras. Imports nothing."""
    module = sys.modules.get("tf_keras")
    return module is not None and isinstance(
        optimizer, module.optimizers.Optimizer | module.optimizers.legacy.Optimizer
    )


def distribute_tf_keras(
    optimizer: Any,
    options: Options,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer of tf_keras apply the gradients of all ranks. It is changed and returned.

    Gradients are exchanged in `apply_gradients`, and in `minimize`, which calls it; not where it is told that they have been
    combined (``skip_gradients_aggregation=True``, ``experimental_aggregate_gradients=False``). A LossScaleOptimizer may be
    inside or outside: ranks skip the same steps either way. Saved models name the plain optimizer.

    Args:
        optimizer: Of any class below ``tf_keras.optimizers.Optimizer`` or ``tf_keras.optimizers.legacy.Optimizer``.
        options: How gradients are exchanged.
        backward_passes_per_step: Apply the sum of that many gradients, once in as many calls.
        average_aggregated_gradients: Divide the sums by the number of passes.
        scale_local_gradients: Divide the gradients of local variables by the number of ranks.

    Raises:
        ArgumentError: It is distributed already, or fewer than one pass.
    """
    if isinstance(optimizer, DistributedTfKeras):
        raise DistributedAlreadyError("this optimizer is distributed already: wrap it once.")
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:  # a LossScaleOptimizer, which asks the one inside for the gradients of all replicas
        if isinstance(inner, DistributedTfKeras):
            raise DistributedAlreadyError(
                "the optimizer inside of this LossScaleOptimizer is distributed already: wrap it once."
            )
        if backward_passes_per_step != 1:
            raise ArgumentError(
                "backward_passes_per_step does not go with a LossScaleOptimizer of tf_keras, which looks at every pass: use "
                "larger batches, or Keras 3."
            )
        distribute_tf_keras(inner, options, 1, average_aggregated_gradients, scale_local_gradients)
        return optimizer
    plain = type(optimizer)
    state = _State(options, backward_passes_per_step, average_aggregated_gradients, scale_local_gradients)
    legacy = hasattr(plain, "_aggregate_gradients")
    # As hvdlite_tf.optimizers.wrap does it: what is saved names the plain class.
    optimizer.__class__ = type(
        plain.__name__,
        (_Legacy if legacy else _New, plain),
        {"__module__": plain.__module__, "__doc__": plain.__doc__, "__class__": property(lambda self: plain)},
    )
    # Not by plain assignment: tf_keras would take it for part of what a checkpoint holds.
    object.__setattr__(optimizer, "_hvdlite_state", state)
    state.identity.rates = rates_of_variables(optimizer)
    return optimizer


class _State(SummedPasses):
    """How the gradients of one optimizer are combined."""

    identity: Identity

    def __init__(self, options: Options, passes: int, average: bool, scale_local: bool) -> None:
        super().__init__(options, passes, average, scale_local, Identity(world("DistributedOptimizer")))
        self.counts_passes = False
        """Let the optimizer's `iterations` count passes, and not only what is applied, which is what Adam's correction and
        schedules of the learning rate want."""


class DistributedTfKeras:
    """What `distribute_tf_keras` adds to an optimizer's class."""

    _hvdlite_state: _State

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable out of the exchange; see `hvdlite_tf.gradients.local_variables`."""
        self._hvdlite_state.local.register(var)

    @classmethod
    def from_config(cls, config: Any, *arguments: Any, **keywords: Any) -> Any:
        """A plain optimizer of this configuration. Arguments as the plain class has them."""
        plain: Any = next(base for base in cls.__mro__ if not issubclass(base, DistributedTfKeras))
        return plain.from_config(config, *arguments, **keywords)

    def _apply(self, pairs: Iterable[tuple[Any, Any]], apply: Callable[[list[tuple[Any, Any]]], Any]) -> Any:
        """Combine gradients, and apply them if that was the last of several passes."""
        state = self._hvdlite_state
        return state.apply(apply, state.combine_pairs(pairs), self if state.counts_passes else None)


class _New(DistributedTfKeras):
    def apply_gradients(
        self, grads_and_vars: Any, name: Any = None, skip_gradients_aggregation: bool = False, **kwargs: Any
    ) -> Any:
        def apply(pairs: list[tuple[Any, Any]]) -> Any:
            return plain(pairs, name=name, skip_gradients_aggregation=True, **kwargs)

        plain = super().apply_gradients  # type: ignore[misc]
        if skip_gradients_aggregation or not kwargs.pop("experimental_aggregate_gradients", True):
            return apply(list(grads_and_vars))
        return self._apply(grads_and_vars, apply)

    def aggregate_gradients(self, grads_and_vars: Any) -> Any:
        """The gradients of all ranks. Called by a LossScaleOptimizer around this one."""
        return self._hvdlite_state.combine_pairs(grads_and_vars)


class _Legacy(DistributedTfKeras):
    def apply_gradients(
        self, grads_and_vars: Any, name: Any = None, experimental_aggregate_gradients: bool = True
    ) -> Any:
        def apply(pairs: list[tuple[Any, Any]]) -> Any:
            return plain(pairs, name=name, experimental_aggregate_gradients=False)

        plain = super().apply_gradients  # type: ignore[misc]
        # Here, and not in _aggregate_gradients, which sees only variables that have a gradient on this rank.
        return self._apply(grads_and_vars, apply) if experimental_aggregate_gradients else apply(list(grads_and_vars))

    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        # Called by a LossScaleOptimizer around this one.
        return self._hvdlite_state.combine_pairs(grads_and_vars)
