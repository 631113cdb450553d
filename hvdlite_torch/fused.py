"""torch's fused step, where the choice of implementation is left to torch.

It goes through memory once where the others go several times, on CPUs too; the results differ in the last bit. It goes
through it without a look at strides, so that parameter, gradient and state must lie in the same order, or the result is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite_torch.tensor import are_same

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers that have one."""


class FusedStep:
    """Switches an optimizer's groups to the fused implementation, and back.

    Args:
        optimizer: Any.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._applies = isinstance(optimizer, FUSED)
        self._switched: list[dict[str, object]] = []
        self._state_is_plain: bool | None = None
        # By group, the parameters for which the question needs not be asked at each step: there may be thousands.
        self._in_host_memory: dict[int, list[torch.Tensor]] = {}
        self._with_momentum: dict[int, list[torch.Tensor]] = {}
        if self._applies:
            optimizer.register_load_state_dict_post_hook(self._forget)

    def _forget(self, optimizer: torch.optim.Optimizer) -> None:
        self._state_is_plain = None  # what torch makes itself is like the parameter, what was loaded may not be
        self._with_momentum.clear()

    def switch(self) -> None:
        """Let the next step be fused, in the groups for which nothing was chosen and whose tensors are plain."""
        if not self._applies:
            return
        if self._state_is_plain is None:
            values = (value for state in self._optimizer.state.values() for value in state.values())
            self._state_is_plain = all(value.is_contiguous() for value in values if isinstance(value, torch.Tensor))
        if not self._state_is_plain:
            return
        for number, group in enumerate(self._optimizer.param_groups):
            chosen = group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable")
            if not chosen and self._is_plain(number, group["params"]) and self._is_supported(number, group):
                group["fused"] = True
                self._switched.append(group)

    def _is_plain(self, number: int, parameters: Sequence[torch.Tensor]) -> bool:
        # A model that has moved since has moved as a whole.
        moved = bool(parameters) and not parameters[0].is_cpu
        if moved or not are_same(parameters, self._in_host_memory.get(number)):
            if not all(parameter.is_cpu and parameter.is_floating_point() for parameter in parameters):
                return False
            self._in_host_memory[number] = list(parameters)
        gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
        return all([tensor.is_contiguous() for tensors in (parameters, gradients) for tensor in tensors])

    def _is_supported(self, number: int, group: dict[str, Any]) -> bool:
        """Whether torch's fused step can do it: SGD's cannot if parameters have had their first gradient in different steps."""
        if not isinstance(self._optimizer, torch.optim.SGD) or not group["momentum"]:
            return True
        parameters = group["params"]
        if are_same(parameters, self._with_momentum.get(number)):
            return True
        state = self._optimizer.state
        have = [p in state and state[p].get("momentum_buffer") is not None for p in parameters]
        if all(have):
            self._with_momentum[number] = list(parameters)
        return len({had for had, p in zip(have, parameters, strict=True) if p.grad is not None}) <= 1

    def back(self) -> None:
        """Leave the choice to torch again."""
        for group in self._switched:
            group["fused"] = None
        self._switched.clear()
