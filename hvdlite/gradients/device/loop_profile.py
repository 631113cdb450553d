"""What a training loop does between two steps, learned in the first ones.

A gradient can be sent during the backward pass only if nothing changes it before the step. A program does not say whether
something will change it, but a loop repeats itself. So the first steps send nothing early, and learn: how often each parameter
gets a gradient before a step, in which order, and whether the gradients or the weight of the batch are changed afterwards.
"""

from __future__ import annotations

from typing import Any, Protocol

from hvdlite.gradients.planner import LEARNED_STEPS


class GradientState(Protocol):
    """The state of gradients at one moment, as far as the adapter of their framework can tell."""

    def is_like(self, other: Any) -> bool:
        """Return whether the gradients are the same as in `other`, as far as can be seen. The host may wait for the device."""
        ...


class LoopProfile:
    """What the loop that trains one optimizer's parameters does between two steps, learned on one rank.

    Args:
        count: The number of parameters.

    Attributes:
        learning: Whether the profile needs more steps to learn from.
        order: The numbers of the parameters, in the order in which the backward passes of the last step had their gradients.
        passes: For each parameter, the largest number of backward passes that add to its gradient before a step.
        settled: Whether gradients and weight do not change between the backward pass and the step, and all gradients are made
            on one stream. With several streams, gradients could be sent only at the end of the backward pass, when the
            framework joins its streams.
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
        """Note that a backward pass has added to gradient `index` on `stream`. `weight` is the batch weight so far."""
        if self._weight is None:
            self._weight, self._stream = weight, stream
            self.order.clear()
        if stream != self._stream:
            self.settled = False
        self.order.pop(index, None)  # the last pass counts
        self.order[index] = None
        self._counts[index] += 1

    def pass_over(self, state: GradientState) -> None:
        """Note that a backward pass is over, with the gradients in this state."""
        self._seen = state

    def step(self, state: GradientState, weight: float) -> None:
        """Note that a step is about to use the gradients in this state."""
        if self._weight not in (None, weight):
            self.settled = False
        if self._seen is not None and not self._seen.is_like(state):
            self.settled = False
        self.passes = [max(pair) for pair in zip(self.passes, self._counts, strict=True)]
        self._counts = [0] * len(self._counts)
        self._weight, self._seen = None, None

    def stepped(self) -> bool:
        """Note that a step of all ranks is over. Return whether it was the last one to learn from."""
        self._steps += 1
        self.learning = self._steps < LEARNED_STEPS
        return not self.learning
