"""The gradients of an optimizer that cannot add up several passes itself: of tf_keras and of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import Options
from hvdlite_tf.gradients.accumulation import LocalGradientAggregationHelperEager
from hvdlite_tf.gradients.exchange import GradientExchange
from hvdlite_tf.gradients.optimizer_sync import OptimizerSync

Pairs = list[tuple[Any, Any]]
"""Gradients with their variables."""


class SummedPasses(OptimizerSync):
    """Combines the gradients of all ranks, once in several passes, and lets them be applied then.

    Args:
        options: How gradients are exchanged.
        passes: How many passes are added up for one exchange.
        average: Divide the sums by the number of passes.
        scale_local_gradients: Divide the gradients of local variables by the number of ranks.
        identity: What the ranks know the optimizer by.

    Attributes:
        passes: Adds up gradients; None if each pass is exchanged.

    Raises:
        ArgumentError: Fewer than one pass.
    """

    def __init__(
        self,
        options: Options,
        passes: int,
        average: bool,
        scale_local_gradients: bool,
        identity: Identity | None = None,
    ) -> None:
        super().__init__(GradientExchange(options, identity), scale_local_gradients, identity)
        self.passes: LocalGradientAggregationHelperEager | None = None
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
        """The gradients of all ranks; while passes are added up, of this rank so far."""
        listed = list(pairs)
        variables, gradients = [variable for _, variable in listed], [gradient for gradient, _ in listed]
        if self.passes is None:
            combined = self.combine(variables, gradients)
        else:
            combined = self.passes.compute_gradients(self.fill(variables, gradients), variables)
        return list(zip(combined, variables, strict=True))

    def apply(self, apply: Callable[[Pairs], Any], pairs: Pairs, counted: Any = None, **counters: Any) -> Any:
        """Apply what `combine_pairs` has returned: of several passes in the last one only.

        Args:
            apply: Applies gradients.
            pairs: The gradients.
            counted: An optimizer whose `iterations` count the passes that apply nothing, too; None if there is none.
            **counters: ``global_step``, which is counted in the same way.
        """
        if self.passes is None:
            return apply(pairs)
        return self.passes.apply_gradients(lambda: apply(pairs), counted, pairs, **counters)
