"""What a training loop does between two steps, learned in the first ones.

A gradient can be sent during the backward pass only if nothing changes it before the step. Nobody says so; but loops do the
same again and again. How often each parameter gets a gradient before a step, in which order, and whether the gradients or the
weight of the batch are changed afterwards, is seen in the first steps, which send nothing early.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.gradients.planner import LEARNED_STEPS


class LoopProfile:
    """Of the loop that trains one optimizer's parameters, on one rank.

    Args:
        count: The number of parameters.

    Attributes:
        learning: More steps are to be seen.
        order: In which backward passes have gradients, the last step's: numbers of parameters.
        passes: For each parameter, how many backward passes add to its gradient before a step, at most.
        settled: When backward is over, gradients and weight are what they are in the step. And its gradients are all made on
            one stream: whoever has several has to wait for the end of backward, when torch brings them together.
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
        self._seen: _State | None = None

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

    def pass_over(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """A backward pass is over."""
        self._seen = _State(gradients)

    def step(self, gradients: Sequence[torch.Tensor | None], weight: float) -> None:
        """A step is about to use these."""
        if self._weight not in (None, weight):
            self.settled = False
        if self._seen is not None and not self._seen.is_like(_State(gradients)):
            self.settled = False
        self.passes = [max(pair) for pair in zip(self.passes, self._counts, strict=True)]
        self._counts = [0] * len(self._counts)
        self._weight, self._seen = None, None

    def stepped(self) -> bool:
        """A step of all ranks is over. Returns whether this was the last to learn from."""
        self._steps += 1
        self.learning = self._steps < LEARNED_STEPS
        return not self.learning


class _State:
    """What gradients are now.

    Args:
        gradients: Of all parameters. They are kept.
    """

    def __init__(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self._versions = [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]
        # Some changes are no new versions: those through p.grad.data, and a GradScaler's.
        dense = [gradient.detach() for gradient in gradients if gradient is not None and not gradient.is_sparse]
        self._norms = [norm.nan_to_num(0.0) for norm in torch._foreach_norm(dense)] if dense else []

    def is_like(self, other: _State) -> bool:
        """Whether nothing has changed, as far as can be seen. The host may wait for the device."""
        same = all(
            mine is theirs and version == now
            for (mine, version), (theirs, now) in zip(self._versions, other._versions, strict=True)
        )
        return same and all(map(torch.equal, self._norms, other._norms))
