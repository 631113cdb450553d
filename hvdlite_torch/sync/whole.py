"""What an optimizer steps with if each rank steps all parameters: the combined gradients in ``p.grad``, or the rank's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import hvdlite
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.step.gradient_sync import GradientSync
from hvdlite_torch.step.shards import clip_factor, squared_norm
from hvdlite_torch.tensors.sliced import local_of
from hvdlite_torch.tensors.split import is_split, joint_squares


class WholeResults:
    """The `CombinedGradients` of an optimizer that is not sharded: all parameters.

    Args:
        context: The optimizer.
    """

    total_weight = 0.0

    def __init__(self, context: OptimizerContext) -> None:
        self._context = context

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of all parameters that have one."""
        return [local_of(gradient) for parameter in self._context.given() if (gradient := parameter.grad) is not None]

    def clip(self, max_norm: float) -> None:
        """Scale the gradients to a norm of at most `max_norm`. All ranks have the same gradients.

        If the model is split, all ranks that have slices or stages of it call this, and add up their norms.
        """
        parameters = self._context.given()
        if not is_split(parameters):
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            return
        of = [None if parameter.grad is None else local_of(parameter.grad) for parameter in parameters]

        def squares_of(numbers: Sequence[int]) -> float:
            return squared_norm([gradient for number in numbers if (gradient := of[number]) is not None])

        factor = clip_factor(joint_squares(parameters, squares_of), max_norm)
        for gradient in self.gradients():
            gradient.mul_(factor)

    def give(self, there: Sequence[bool]) -> None:
        """Do nothing: a rank without data makes no step."""

    def publish(self) -> None:
        """Do nothing: all ranks have made the same step."""


class OwnSteps(GradientSync):
    """The base of a `GradientSync` for `StepsWith.OWN`: nothing happens to gradients.

    Args:
        context: The optimizer.

    Attributes:
        results: This rank's own gradients.
    """

    def __init__(self, context: OptimizerContext) -> None:
        super().__init__(context)
        self.results = WholeResults(context)

    @property
    def missed(self) -> bool:
        """Whether some rank has missed a step since all ranks had the same state. Every rank calls this."""
        steps = hvdlite.allgather_object(self._context.in_step.steps, process_set=self._context.process_set)
        return len(set(steps)) > 1
