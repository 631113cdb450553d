"""What a training loop does between two steps, learned in the first ones.

A gradient can be sent during the backward pass only if nothing changes it before the step. Nobody says so; but loops do the
same again and again. How often each parameter gets a gradient before a step, in which order, and whether the gradients or the
weight of the batch are changed afterwards, is seen in the first steps, which send nothing early.
"""

from __future__ import annotations

from typing import Any, Protocol

from hvdlite.gradients.planner import LEARNED_STEPS


class GradientState(Protocol):
    """What gradients are at one time, as the adapter of their framework can tell."""

    def is_like(self, other: Any) -> bool:
        """Whether nothing has changed, as far as can be seen. The host may wait for the device."""
        ...


class LoopProfile:
    """Of the loop that trains one optimizer's parameters, on one rank.

    Args:
        count: The number of parameters.

    Attributes:
        learning: More steps are to be seen.
        order: In which backward passes have gradients, the last step's: numbers of parameters.
        passes: For each parameter, how many backward passes add to its gradient before a step, at most.
        settled: When backward is over, gradients and weight are what they are in the step. And its gradients are all made on
            one stream: whoever has several has to wait for the end of backward, when the framework brings them together.
    """

    def __init__(self, count: int) -> None:
        self.learning = True
        self.order: dict[int, None] = {}
        self.passes = [0] * count
        self.settled = True
        self._steps = 0
        self._counts = [0] * count
        self._weight: float | None = None
        self._stream = 0
        self._seen: GradientState | None = None

    def saw(self, index: int, weight: float, stream: int) -> None:
        """A backward pass has added to a gradient, on a stream; `weight` is that of the batch so far."""
        if self._weight is None:
            self._weight, self._stream = weight, stream
            self.order.clear()
        if stream != self._stream:
            self.settled = False
        self.order.pop(index, None)  # what counts is the last pass
        self.order[index] = None
        self._counts[index] += 1

    def pass_over(self, state: GradientState) -> None:
        """A backward pass is over, with gradients in this state."""
        self._seen = state

    def step(self, state: GradientState, weight: float) -> None:
        """A step is about to use gradients in this state."""
        if self._weight not in (None, weight):
            self.settled = False
        if self._seen is not None and not self._seen.is_like(state):
            self.settled = False
        self.passes = [max(pair) for pair in zip(self.passes, self._counts, strict=True)]
        self._counts = [0] * len(self._counts)
        self._weight, self._seen = None, None

    def stepped(self) -> bool:
        """A step of all ranks is over. Returns whether this was the last to learn from."""
        self._steps += 1
        self.learning = self._steps < LEARNED_STEPS
        return not self.learning
