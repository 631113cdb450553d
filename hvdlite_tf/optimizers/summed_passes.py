"""Gradients over several passes, for optimizers that cannot accumulate them: those of tf_keras and TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import ExchangeOptions
from hvdlite_tf.gradients.accumulation import LocalGradientAggregationHelperEager
from hvdlite_tf.gradients.exchange import GradientExchange
from hvdlite_tf.gradients.optimizer_sync import OptimizerSync

Pairs = list[tuple[Any, Any]]
"""Pairs of a gradient and its variable."""


class SummedPasses(OptimizerSync):
    """The state of a distributed optimizer that combines and applies the gradients of all ranks once in several passes.

    Args:
        options: How the gradients are exchanged.
        passes: The number of passes whose gradients are added up for one exchange.
        average: Whether the sums are divided by the number of passes.
        scale_local_gradients: Whether the gradients of local variables are divided by the number of ranks.
        identity: The identity by which the ranks match their optimizers.

    Attributes:
        passes: The object that accumulates gradients; None if each pass is exchanged.
        trained: The variables of the latest call; empty before the first one.

    Raises:
        ArgumentError: `passes` is less than 1.
    """

    def __init__(
        self,
        options: ExchangeOptions,
        passes: int,
        average: bool,
        scale_local_gradients: bool,
        identity: Identity | None = None,
    ) -> None:
        super().__init__(GradientExchange(options, identity), scale_local_gradients, identity)
        self.passes: LocalGradientAggregationHelperEager | None = None
        self.trained: list[Any] = []
        if passes != 1:
            self.passes = LocalGradientAggregationHelperEager(
                passes,
                lambda gradients, variables: self.exchange.combine(variables, gradients),
                options.sparse_as_dense,
                average,
                options.process_set,
                scale_local_gradients,
            )
            self.passes.local = self.local

    def combine_pairs(self, pairs: Iterable[tuple[Any, Any]]) -> Pairs:
        """Return the gradients of all ranks with their variables; before the last pass, this rank's sums so far."""
        listed = list(pairs)
        variables, gradients = [variable for _, variable in listed], [gradient for gradient, _ in listed]
        self.trained = variables
        if self.passes is None:
            combined = self.combine(variables, gradients)
        else:
            combined = self.passes.compute_gradients(self.fill(variables, gradients), variables)
        return list(zip(combined, variables, strict=True))

    def apply(self, apply: Callable[[Pairs], Any], pairs: Pairs, counted: Any = None, **counters: Any) -> Any:
        """Apply the gradients that `combine_pairs` returned; of several passes, only the last one applies them.

        Args:
            apply: The function that applies gradients.
            pairs: The gradients with their variables.
            counted: An optimizer whose `iterations` also count the passes that apply nothing, or None.
            **counters: ``global_step``, which also counts the passes that apply nothing.
        """
        if self.passes is None:
            return apply(pairs)
        return self.passes.apply_gradients(lambda: apply(pairs), counted, pairs, **counters)
