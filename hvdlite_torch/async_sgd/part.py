"""`TorchPart`: the parameters of one server in host memory, with an optimizer of the class that the program has chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.async_sgd.deal import Layout
from hvdlite.async_sgd.part import Push
from hvdlite.protocols import Array
from hvdlite_torch.async_sgd import settings
from hvdlite_torch.async_sgd.views import views
from hvdlite_torch.step.shardable import copy_with


class TorchPart:
    """A `hvdlite.async_sgd.part.Part` of torch.

    Args:
        optimizer: The program's optimizer. The part has another one of its class, with the same groups and the same state.
        parameters: All parameters that are trained, in the order of the optimizer.
        layout: Which of them are of this part.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], layout: Layout) -> None:
        self._layout, self._like = layout, parameters
        self._own = [
            torch.nn.Parameter(parameters[number].detach().to("cpu", copy=True).contiguous())
            for number in layout.tensors
        ]
        replaced: dict[int, Any] = {id(p): None for group in optimizer.param_groups for p in group["params"]}
        replaced |= {id(parameters[number]): own for number, own in zip(layout.tensors, self._own, strict=True)}
        self._optimizer = copy_with(optimizer, replaced)
        self.load(optimizer.state)

    def load(self, state: Any) -> None:
        """Take over the present values of the parameters, and the optimizer's state.

        Args:
            state: For each of the program's parameters, its state; a parameter may have none.
        """
        self._optimizer.state.clear()
        with torch.no_grad():
            for number, own in zip(self._layout.tensors, self._own, strict=True):
                own.copy_(self._like[number])
                if self._like[number] in state:
                    self._optimizer.state[own] = _on_host(state[self._like[number]])

    def state(self) -> dict[int, Any]:
        """Return the optimizer's state by the numbers of the parameters."""
        there = self._optimizer.state
        return {number: there[own] for number, own in zip(self._layout.tensors, self._own, strict=True) if own in there}

    def step(self, pushes: Sequence[Push]) -> None:
        """See `hvdlite.async_sgd.part.Part`."""
        settings.unpack(pushes[0].settings, self._optimizer.param_groups)
        given = [views(push.gradients, self._layout, self._like) for push in pushes]
        total = sum(push.weight for push in pushes)
        for place, own in enumerate(self._own):
            there = [
                (push.weight, gradients[place])
                for push, gradients in zip(pushes, given, strict=True)
                if push.present[place]
            ]
            if not there:
                own.grad = None
            elif len(pushes) == 1:
                own.grad = there[0][1]
            else:
                # Weights are whole numbers, mostly, so the sum is as exact as the gradients are.
                own.grad = torch.zeros_like(own)
                for weight, gradient in there:
                    own.grad.add_(gradient, alpha=weight)
                own.grad.div_(total)
        if any(own.grad is not None for own in self._own):
            self._optimizer.step()
        for own in self._own:
            own.grad = None  # it may be a view of a message

    def read(self, into: Array) -> None:
        """See `hvdlite.async_sgd.part.Part`."""
        with torch.no_grad():
            for own, view in zip(self._own, views(into, self._layout, self._like), strict=True):
                view.copy_(own)


def _on_host(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    return {key: _on_host(value) for key, value in state.items()} if isinstance(state, dict) else state
