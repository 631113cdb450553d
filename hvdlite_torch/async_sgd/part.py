"""`TorchPart`: the parameters of one server in host memory, with an optimizer of the class that the program has chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvdlite.async_sgd.compensation import DelayCompensation
from hvdlite.async_sgd.deal import ServerLayout
from hvdlite.async_sgd.part import Push
from hvdlite.protocols import Array
from hvdlite_torch.async_sgd import settings
from hvdlite_torch.async_sgd.sparse import tensor_of
from hvdlite_torch.async_sgd.views import views
from hvdlite_torch.checks.trial import copy_with

_MEAN_SQUARE = "delay_mean_square"
"""Where the optimizer's state of a parameter has what `DelayCompensation.corrected` keeps. So it is saved and loaded too."""


class TorchPart:
    """A `hvdlite.async_sgd.training.replica.StatefulPart` of torch.

    Args:
        optimizer: The program's optimizer. The part has another one of its class, with the same groups and the same state.
        parameters: All parameters that are trained, in the order of the optimizer.
        layout: Which of them are of this part.
        compensation: What to do about old gradients.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        layout: ServerLayout,
        compensation: DelayCompensation,
    ) -> None:
        self._layout, self._like, self._compensation = layout, parameters, compensation
        self._own = [
            torch.nn.Parameter(parameters[number].detach().to("cpu", copy=True).contiguous())
            for number in layout.tensors
        ]
        replaced: dict[int, Any] = {id(p): None for group in optimizer.param_groups for p in group["params"]}
        replaced |= {id(parameters[number]): own for number, own in zip(layout.tensors, self._own, strict=True)}
        self._optimizer = copy_with(optimizer, replaced)
        self.load({number: optimizer.state[p] for number, p in enumerate(parameters) if p in optimizer.state})

    def load(self, state: Mapping[int, Any]) -> None:
        """Take over the present values of the parameters, and the optimizer's state.

        Args:
            state: The state by the numbers of the parameters; a parameter may have none.
        """
        self._optimizer.state.clear()
        with torch.no_grad():
            for number, own in zip(self._layout.tensors, self._own, strict=True):
                own.copy_(self._like[number])
                if number in state:
                    self._optimizer.state[own] = _on_host(state[number])

    def state(self) -> dict[int, Any]:
        """Return the optimizer's state by the numbers of the parameters."""
        there = self._optimizer.state
        return {number: there[own] for number, own in zip(self._layout.tensors, self._own, strict=True) if own in there}

    def step(self, pushes: Sequence[Push]) -> None:
        """See `hvdlite.async_sgd.part.ServerPart`."""
        settings.unpack(pushes[0].settings, self._optimizer.param_groups, pushes[0].rate)
        given = [views(push.gradients, self._layout, self._like) for push in pushes]
        total = sum(push.weight for push in pushes)
        for place, own in enumerate(self._own):
            there = []
            for push, dense in zip(pushes, given, strict=True):
                if push.present[place]:
                    there.append((push.weight, dense[place]))
                elif place in push.rows:
                    there.append((push.weight, tensor_of(push.rows[place], own)))
            own.grad = there[0][1] if there and len(pushes) == 1 else _mean(there, total)
        kept = {} if pushes[0].pulled is None else self._correct(pushes[0].pulled)
        if any(own.grad is not None for own in self._own):
            self._optimizer.step()
        for own, value in kept.items():  # not earlier: a parameter without any state is new for many optimizers
            self._optimizer.state[own][_MEAN_SQUARE] = value
        for own in self._own:
            own.grad = None  # it may be a view of a message

    @torch.no_grad()
    def _correct(self, pulled: Array) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Correct the gradients for their delay. Return what is to be kept for each parameter."""
        kept = {}
        for own, then in zip(self._own, views(pulled, self._layout, self._like), strict=True):
            gradient = own.grad
            if gradient is None:
                continue
            wide = torch.promote_types(own.dtype, torch.float32)  # squares of gradients are too small for float16
            before = self._optimizer.state[own].get(_MEAN_SQUARE) if own in self._optimizer.state else None
            rows = gradient.indices()[0] if gradient.is_sparse else ...
            value, kept_rows = self._compensation.corrected(
                (gradient.values() if gradient.is_sparse else gradient).to(wide),
                own[rows].to(wide),
                then[rows].to(wide),
                None if before is None else before[rows],
            )
            if gradient.is_sparse:
                own.grad = None  # torch does not change the values of a sparse gradient
                own.grad = torch.sparse_coo_tensor(
                    gradient.indices(), value.to(own.dtype), own.shape, check_invariants=False, is_coalesced=True
                )
            else:
                own.grad = value.to(own.dtype)
            if kept_rows is not None:
                kept[own] = torch.zeros_like(own, dtype=wide) if before is None else before
                kept[own][rows] = kept_rows
        return kept

    def read(self, into: Array) -> None:
        """See `hvdlite.async_sgd.part.ServerPart`."""
        with torch.no_grad():
            for own, view in zip(self._own, views(into, self._layout, self._like), strict=True):
                view.copy_(own)


def _mean(there: Sequence[tuple[float, torch.Tensor]], total: float) -> torch.Tensor | None:
    """Return the sum of weighted gradients divided by `total`, sparse if one of them is; None if there is none."""
    if not there:
        return None
    if any(gradient.is_sparse for _, gradient in there):
        there = [(weight, gradient if gradient.is_sparse else gradient.to_sparse(1)) for weight, gradient in there]
    # Weights are whole numbers, mostly, so the sum is as exact as the gradients are.
    mean = there[0][1] * there[0][0]
    for weight, gradient in there[1:]:
        mean.add_(gradient, alpha=weight)
    return mean.div_(total).coalesce() if mean.is_sparse else mean.div_(total)


def _on_host(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    return {key: _on_host(value) for key, value in state.items()} if isinstance(state, dict) else state
