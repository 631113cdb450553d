"""`Capture` refuses steps that cannot be replayed from a CUDA graph: a graph is replayed without the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.errors import ArgumentError
from hvdlite.gradients.planner import LEARNED_STEPS
from hvdlite_torch.tensors.device import is_capturing


class Capture:
    """Knows which parts of the present step are captured into a CUDA graph.

    Attributes:
        backward: Whether the first backward pass of this step is captured; None before that pass.
    """

    def __init__(self) -> None:
        self.backward: bool | None = None

    def begin_step(self) -> None:
        """Forget the backward pass of the last step."""
        self.backward = None

    def saw_backward(self) -> None:
        """Note whether a backward pass is captured. Only the first one of a step counts."""
        if self.backward is None:
            self.backward = is_capturing()

    def check_step(self, parameters: Sequence[torch.Tensor], weight: float, learning: bool) -> None:
        """Raise ArgumentError unless the present step can be replayed or is not captured.

        Args:
            parameters: The parameters of the optimizer.
            weight: The number of samples of this rank.
            learning: Whether the loop profile is learned in this step, for which the host waits.

        Raises:
            ArgumentError: The step is captured and cannot be replayed. The text says why.
        """
        problem = ""
        if not is_capturing():
            if self.backward:
                problem = (
                    "the backward pass was captured into a CUDA graph, and the step was not: capture optimizer.step() as well. "
                    "Replays run no hooks, so nobody would know where the gradients of the next pass are."
                )
        elif learning:
            problem = (
                f"one of the first {LEARNED_STEPS} steps is captured into a CUDA graph, and the host waits in it: make some "
                "steps before."
            )
        elif weight == 0 or any([parameter.grad is None for parameter in parameters]):
            problem = (
                "a step is captured into a CUDA graph in which this rank has no samples, or lacks the gradient of a parameter, "
                "so that the host would wait in it. Freeze parameters that are not used (requires_grad_(False)) before."
            )
        if problem:
            raise ArgumentError(problem)
