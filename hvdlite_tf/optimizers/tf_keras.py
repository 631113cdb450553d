"""The one-line wrap for the optimizers of tf_keras (Keras 2), new and legacy ones.

Both ask a method of their own for the gradients of all replicas before they clip and apply them. The subclass that is made here
overrides this method, and combines the gradients of all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.errors import ArgumentError, DistributedAlreadyError
from hvdlite_tf.gradients.optimizer_parts import passes_of, rates_of_variables, settings_of, state_of
from hvdlite_tf.optimizers.summed_passes import SummedPasses
from hvdlite_tf.variables import has_value


def is_tf_keras(optimizer: Any) -> bool:
    """Return whether this is an optimizer of tf_keras, without importing tf_keras."""
    module = sys.modules.get("tf_keras")
    return module is not None and isinstance(
        optimizer, module.optimizers.Optimizer | module.optimizers.legacy.Optimizer
    )


def distribute_tf_keras(
    optimizer: Any,
    options: ExchangeOptions,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer of tf_keras apply the gradients of all ranks. It is changed and returned.

    The ranks exchange gradients in `apply_gradients`, and so in `minimize`, which calls it. They do not if the caller says that
    the gradients are combined already (``skip_gradients_aggregation=True``, ``experimental_aggregate_gradients=False``). A
    LossScaleOptimizer may be inside or outside; all ranks skip the same steps in both cases. Saved models name the plain
    optimizer.

    Args:
        optimizer: An instance of a subclass of ``tf_keras.optimizers.Optimizer`` or ``tf_keras.optimizers.legacy.Optimizer``.
        options: How the gradients are exchanged.
        backward_passes_per_step: The number of calls whose gradients each rank adds up; the last of them applies the sum.
        average_aggregated_gradients: Whether the sums are divided by the number of passes.
        scale_local_gradients: Whether the gradients of local variables are divided by the number of ranks.

    Raises:
        ArgumentError: `optimizer` is distributed already, or `backward_passes_per_step` is less than 1, or does not go with a
            LossScaleOptimizer.
    """
    if isinstance(optimizer, DistributedTfKeras):
        raise DistributedAlreadyError("this optimizer is distributed already: wrap it once.")
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:  # a LossScaleOptimizer, which asks the inner optimizer for the gradients of all replicas
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
    # `__class__` is the plain class, so that saved models name that one, as in hvdlite_tf.optimizers.keras.
    optimizer.__class__ = type(
        plain.__name__,
        (_Legacy if legacy else _New, plain),
        {"__module__": plain.__module__, "__doc__": plain.__doc__, "__class__": property(lambda self: plain)},
    )
    # A plain assignment would make tf_keras save the state in checkpoints.
    object.__setattr__(optimizer, "_hvdlite_state", state)
    state.identity.optimizer = optimizer
    state.identity.rates = rates_of_variables(optimizer)
    state.identity.settings = settings_of(optimizer)
    return optimizer


class _State(SummedPasses):
    """The state of a distributed optimizer of tf_keras."""

    identity: Identity

    def __init__(self, options: ExchangeOptions, passes: int, average: bool, scale_local: bool) -> None:
        super().__init__(options, passes, average, scale_local, Identity(options.process_set))
        self.counts_passes = False
        """Whether the optimizer's `iterations` count all passes, as in Horovod. If not, they count only the updates, which is
        right for Adam's bias correction and learning rate schedules."""


class DistributedTfKeras:
    """The methods that `distribute_tf_keras` adds to an optimizer's class."""

    _hvdlite_state: _State

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable out of the exchange; see `hvdlite_tf.gradients.local_variables`."""
        self._hvdlite_state.local.register(var)

    def hvdlite_variables(self) -> list[Any]:
        """Return the variables that are equal on all ranks: the model's trainable ones and the optimizer's."""
        return [*self._hvdlite_state.trained, *state_of(self)]

    def hvdlite_passes(self) -> int | None:
        """Return how many backward passes the optimizer has had; None while its variables have no values.

        None with local variables too: which slots belong to them is not known, so a join gives no rank the others' state.
        """
        state = self._hvdlite_state
        if state.local or not state.trained or not all(map(has_value, self.hvdlite_variables())):
            return None
        made, passes = passes_of(self), state.passes
        if passes is None or state.counts_passes:
            return made
        return made * passes.backward_passes_per_step + int(passes.counter.numpy())

    def hvdlite_settle(self, passes: Sequence[int], root: int) -> None:
        """Forget the passes since the last update, after some ranks have missed passes."""
        if self._hvdlite_state.passes is not None:
            self._hvdlite_state.passes.settle()

    def hvdlite_rounds(self) -> None:
        """None: all ranks have the same state."""

    @classmethod
    def from_config(cls, config: Any, *arguments: Any, **keywords: Any) -> Any:
        """Make a plain optimizer of this configuration. The arguments are those of the plain class."""
        plain: Any = next(base for base in cls.__mro__ if not issubclass(base, DistributedTfKeras))
        return plain.from_config(config, *arguments, **keywords)

    def _apply(self, pairs: Iterable[tuple[Any, Any]], apply: Callable[[list[tuple[Any, Any]]], Any]) -> Any:
        """Combine the gradients, and apply them if this is the last of several passes."""
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
        """Return the gradients of all ranks with their variables. A LossScaleOptimizer around this optimizer calls it."""
        return self._hvdlite_state.combine_pairs(grads_and_vars)


class _Legacy(DistributedTfKeras):
    def apply_gradients(
        self, grads_and_vars: Any, name: Any = None, experimental_aggregate_gradients: bool = True
    ) -> Any:
        def apply(pairs: list[tuple[Any, Any]]) -> Any:
            return plain(pairs, name=name, experimental_aggregate_gradients=False)

        plain = super().apply_gradients  # type: ignore[misc]
        # The exchange is here, because _aggregate_gradients sees only variables that have a gradient on this rank.
        return self._apply(grads_and_vars, apply) if experimental_aggregate_gradients else apply(list(grads_and_vars))

    def _aggregate_gradients(self, grads_and_vars: Any) -> Any:
        # A LossScaleOptimizer around this optimizer calls it.
        return self._hvdlite_state.combine_pairs(grads_and_vars)
