"""`GradientSync`: the base of what lies between "a backward pass has gradients" and "all ranks step with the same".

One object on each rank does this for one model. It combines gradients before a step, or changes of parameters after it. It
knows nothing of closures, clipping, scaled losses or skipped steps: `StepDriver` knows them, and drives this object. So a new
way to train on several ranks is one class with some of these methods; the others do nothing::

                        ready           combine              before_step        after_step
    gradients           copy early      sum over ranks       –                  –
    sharded             copy early      sum of own shard     –                  bring the new shard to all ranks
    Adasum              –               –                    keep parameters    combine their changes
    local SGD, DiLoCo   –               –                    –                  every k steps: average parameters
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hvdlite_torch.step.context import OptimizerContext


class CombinedGradients(Protocol):
    """The combined gradients that one rank steps with: the gradients of all parameters, or of its shard.

    Attributes:
        total_weight: The sum of the weights of all ranks, in the last step in which this rank had no data.
    """

    @property
    def total_weight(self) -> float: ...

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that the step will use."""
        ...

    def clip(self, max_norm: float) -> None:
        """Scale the gradients so that their norm over all parameters is at most `max_norm`. Every rank calls this."""
        ...

    def give(self, there: Sequence[bool]) -> None:
        """Give the parameters, or pieces of parameters, that this rank steps their combined gradients.

        Args:
            there: For each parameter, whether any rank has a gradient of it. Where none has, the gradient becomes None.
        """
        ...

    def publish(self) -> None:
        """Give all ranks the parameters that this rank has stepped. Every rank calls this after its optimizer's step."""
        ...


class GradientSync:
    """The work of one rank so that all ranks train one model.

    All ranks call each method but `ready` and `leave` at the same point of the program.

    Args:
        context: The optimizer.

    Attributes:
        results: What the optimizer steps with.
    """

    results: CombinedGradients

    def __init__(self, context: OptimizerContext) -> None:
        self._context = context

    @property
    def missed(self) -> bool:
        """Whether some rank has missed a step since all ranks had the same state, as far as this is known.

        All ranks have the same answer.
        """
        return False

    def begin(self) -> None:
        """Make memory, channels and hooks in the present world."""

    def make_hooks(self) -> None:
        """Have torch call `ready` after backward passes: for all parameters, if the step counts the passes of all."""

    def ready(self, index: int, parameter: torch.Tensor) -> None:
        """Note that a backward pass has added to the gradient of parameter `index`."""

    def combine(self) -> None:
        """Give each parameter that is stepped its combined gradient, or None if no rank has one."""

    def leave_out(self) -> None:
        """Note that the program makes a step without `combine`."""

    def changed_unseen(self, how: str) -> None:
        """Note that this rank's gradients have been changed, in a way that torch does not show.

        Args:
            how: The change in words, for messages.
        """

    def before_step(self) -> None:
        """Run before the optimizer steps."""

    def after_step(self) -> None:
        """Run after the optimizer has stepped."""

    def stand_in(self) -> list[bool] | None:
        """Take part in one step of the other ranks without data.

        Returns:
            For each parameter, whether any rank has a gradient of it; an empty list if the others' step has failed or is
            postponed; None if all ranks have run out of data, or if they meet in named operations only, in which a rank that
            has joined takes part anyway.
        """
        return None

    def have_same_state(self) -> None:
        """Note that all ranks have been given the same parameters and state."""

    def leave(self) -> None:
        """Drop what belongs to the world that has ended. `begin` is called in the next world."""
