"""`WholeResults`: each rank steps all parameters, with the combined gradients in ``p.grad``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite_torch.step.context import OptimizerContext


class WholeResults:
    """The `hvdlite.gradients.sync.Results` of an optimizer that is not sharded: all parameters.

    Args:
        context: The optimizer.
    """

    total_weight = 0.0

    def __init__(self, context: OptimizerContext) -> None:
        self._context = context

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of all parameters that have one."""
        return [gradient for parameter in self._context.trained() if (gradient := parameter.grad) is not None]

    def clip(self, max_norm: float) -> None:
        """Scale the gradients to a norm of at most `max_norm`. No communication: all ranks have the same gradients."""
        torch.nn.utils.clip_grad_norm_(self._context.trained(), max_norm)

    def give(self, there: Sequence[bool]) -> None:
        """Do nothing: a rank without data makes no step."""

    def publish(self) -> None:
        """Do nothing: all ranks have made the same step."""
