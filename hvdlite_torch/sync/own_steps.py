"""`OwnSteps`: what the ways have in common in which each rank steps with its own gradients."""

from __future__ import annotations

from typing import Any

import hvdlite
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.sync.whole import WholeResults


class OwnSteps:
    """The part of a `hvdlite.gradients.sync.GradientSync` for `StepsWith.OWN`: nothing happens to gradients.

    Args:
        context: The optimizer.

    Attributes:
        results: This rank's own gradients.
    """

    def __init__(self, context: OptimizerContext) -> None:
        self._context = context
        self.results = WholeResults(context)

    @property
    def missed(self) -> bool:
        """Whether some rank has missed a step since all ranks had the same state. Every rank calls this."""
        steps = hvdlite.allgather_object(self._context.in_step.steps, process_set=self._context.process_set)
        return len(set(steps)) > 1

    def stand_in(self) -> None:
        """Do nothing: ranks meet in named operations, in which a rank that has joined takes part anyway."""

    # Gradients are each rank's own, so these methods do nothing.

    def begin(self) -> None: ...
    def make_hooks(self) -> None: ...
    def ready(self, index: int, parameter: Any) -> None: ...
    def combine(self) -> None: ...
    def leave_out(self) -> None: ...
    def changed_unseen(self, how: str) -> None: ...
    def have_same_state(self) -> None: ...
    def leave(self) -> None: ...
