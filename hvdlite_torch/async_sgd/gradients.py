"""`LocalGradients`: one worker's gradients, added up until the next push."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hvdlite.async_sgd.deal import Layout
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import Array
from hvdlite_torch.async_sgd.views import views


class LocalGradients:
    """Adds the gradients of each step to those of the steps before it, in the memory from which they are pushed.

    Args:
        parameters: The parameters.
        names: Their names.
        layouts: The servers' parts.
        memory: For each server, the memory of a push.
        rank: The number of this rank in the job, for error texts.

    Attributes:
        steps: The number of steps since the last push.
        weight: The weights of these steps, added up.
        present: For each server, which of its tensors have a gradient: bool, shape ``(tensors,)``.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        layouts: Sequence[Layout],
        memory: Sequence[Array],
        rank: int,
    ) -> None:
        self._parameters, self._names, self._rank = parameters, names, rank
        self._views: dict[int, torch.Tensor] = {}
        self._place: dict[int, tuple[int, int]] = {}
        for server, (layout, data) in enumerate(zip(layouts, memory, strict=True)):
            self._views |= zip(layout.tensors, views(data, layout, parameters), strict=True)
            self._place |= {number: (server, place) for place, number in enumerate(layout.tensors)}
        self.present = [np.zeros(len(layout.tensors), bool) for layout in layouts]
        self.steps, self.weight = 0, 0.0

    def add(self, weight: float) -> None:
        """Add the gradients of a step.

        Args:
            weight: The number of samples. A step of 0 samples has no gradients, whatever ``p.grad`` says.

        Raises:
            ArgumentError: A gradient has NaN or infinite elements. Nothing was added.
            UnsupportedTensorError: A gradient is sparse. Nothing was added.
        """
        given = {number: p.grad for number, p in enumerate(self._parameters) if p.grad is not None and weight > 0}
        for number, gradient in given.items():
            self._check(number, gradient)
        with torch.no_grad():
            for number, gradient in given.items():
                server, place = self._place[number]
                if self.present[server][place]:
                    self._views[number].add_(gradient.to("cpu"))
                else:
                    self._views[number].copy_(gradient)
                    self.present[server][place] = True
        self.steps += 1
        self.weight += weight

    def clear(self) -> None:
        """Begin anew, after a push."""
        self.steps, self.weight = 0, 0.0
        for present in self.present:
            present[:] = False

    def _check(self, number: int, gradient: torch.Tensor) -> None:
        name = self._names[number]
        if gradient.layout is not torch.strided:
            raise UnsupportedTensorError(
                f"rank {self._rank}: the gradient of {name} has the layout {gradient.layout}: a parameter server takes dense "
                "gradients. Make the layer with sparse=False, or use DistributedOptimizer, which sends rows."
            )
        # The sum finds almost everything, and is faster than a look at each element; but a sum may overflow.
        if not bool(torch.isfinite(gradient.sum())) and not bool(torch.isfinite(gradient).all()):
            raise ArgumentError(
                f"rank {self._rank}: the gradient of {name} has elements that are NaN or infinite, so nothing of this step was "
                "pushed, and no server has changed. Use a smaller learning rate or torch.nn.utils.clip_grad_norm_, or leave "
                "out this batch."
            )
