"""Every rank steps all parameters, with the gradients in ``p.grad``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite_torch.step.context import OptimizerContext


class WholeResults:
    """The gradients of all parameters, as `hvdlite.gradients.sync.Results`.

    Args:
        context: The optimizer.
    """

    total_weight = 0.0

    def __init__(self, context: OptimizerContext) -> None:
        self._context = context

    def gradients(self) -> list[torch.Tensor]:
        """Those of the parameters that have one."""
        return [gradient for parameter in self._context.trained() if (gradient := parameter.grad) is not None]

    def clip(self, max_norm: float) -> None:
        """See `Results.clip`: all ranks have the same gradients, so none asks another."""
        torch.nn.utils.clip_grad_norm_(self._context.trained(), max_norm)

    def give(self, there: Sequence[bool]) -> None:
        """Nothing: a rank that has no data makes no step."""

    def publish(self) -> None:
        """Nothing: all ranks have made the same step."""
