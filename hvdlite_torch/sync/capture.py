"""What can be a part of a CUDA graph, which is captured once and then replayed without the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.errors import ArgumentError
from hvdlite.gradients.planner import LEARNED_STEPS
from hvdlite_torch.tensors.device import is_capturing


class Capture:
    """Of one step after the other: what of it is captured into a graph.

    Attributes:
        backward: Whether this step's first backward pass became part of a graph; None before it.
    """

    def __init__(self) -> None:
        self.backward: bool | None = None

    def begin_step(self) -> None:
        """There has been no backward pass since the last step."""
        self.backward = None

    def saw_backward(self) -> None:
        """A backward pass goes on. The first one of a step counts."""
        if self.backward is None:
            self.backward = is_capturing()

    def check_step(self, parameters: Sequence[torch.Tensor], weight: float, learning: bool) -> None:
        """Let a step pass that can be replayed if it is captured.

        Args:
            parameters: Of the optimizer.
            weight: This rank's.
            learning: The host waits in this step.

        Raises:
            ArgumentError: A CUDA graph is captured that cannot be replayed. The text says why.
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
