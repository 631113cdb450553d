"""torch's fused step, where the choice of implementation is left to torch.

It goes through memory once where the others go several times, on CPUs too; the results differ in the last bit. It goes
through it without a look at strides, shapes and dtypes, so that parameter, gradient and state must lie in the same order, or
the result is wrong. Of some dtypes it is wrong in any case (torch 2.13 leaves most elements of bfloat16 as they are in SGD), of
others it calculates coarser than torch's default, so it is used for float32 only; and only once it has been tried out.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from hvdlite_torch.tensors.adapter import are_same

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers that have one."""

TOLERANCE = 1e-5
"""How far the two may be apart after a few steps, in parts of how far the parameters have moved."""

_CHOICES = ("params", "param_names", "fused", "foreach", "differentiable")
"""Of a group, what is no option of the algorithm."""

_verdicts: dict[Hashable, bool] = {}


class FusedStep:
    """Switches an optimizer's groups to the fused implementation, and back.

    Args:
        optimizer: Any.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._class = next((cls for cls in FUSED if isinstance(optimizer, cls)), None)
        self._switched: list[dict[str, object]] = []
        # What programs put into the state may be anything, at any time; what was looked at needs no second look.
        self._seen: list[object] | None = None
        self._state_is_plain = True
        # By group, the parameters for which the question needs not be asked at each step: there may be thousands.
        self._in_host_memory: dict[int, list[torch.Tensor]] = {}
        self._with_momentum: dict[int, list[torch.Tensor]] = {}

    def switch(self) -> None:
        """Let the next step be fused, in the groups for which nothing was chosen and whose tensors are plain."""
        if self._class is None or not self._has_plain_state():
            return
        for number, group in enumerate(self._optimizer.param_groups):
            chosen = group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable")
            if (
                not chosen
                and self._is_plain(number, group["params"])
                and self._is_supported(number, group)
                and agrees(self._class, group)
            ):
                group["fused"] = True
                self._switched.append(group)

    def _has_plain_state(self) -> bool:
        state = self._optimizer.state
        values = [*itertools.chain.from_iterable(each.values() for each in state.values())]
        if self._seen is None or len(values) != len(self._seen) or not are_same(values, self._seen):  # type: ignore[arg-type]
            self._seen = values
            self._with_momentum.clear()
            self._state_is_plain = all(
                _is_like(value, parameter) for parameter, its in state.items() for value in its.values()
            )
        return self._state_is_plain

    def _is_plain(self, number: int, parameters: Sequence[torch.Tensor]) -> bool:
        # A model that has moved since has moved as a whole.
        moved = bool(parameters) and not parameters[0].is_cpu
        if moved or not are_same(parameters, self._in_host_memory.get(number)):
            if not all(parameter.is_cpu for parameter in parameters):
                return False
            self._in_host_memory[number] = list(parameters)
        gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
        return all(
            [t.dtype is torch.float32 and t.is_contiguous() for tensors in (parameters, gradients) for t in tensors]
        )

    def _is_supported(self, number: int, group: dict[str, Any]) -> bool:
        """Whether torch's fused step can do it: SGD's cannot if parameters have had their first gradient in different steps."""
        if self._class is not torch.optim.SGD or not group["momentum"]:
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


def _is_like(value: object, parameter: torch.Tensor) -> bool:
    """Whether something of the state is a number, or lies as the parameter does: what torch makes itself is and does."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return True
    return value.shape == parameter.shape and value.dtype is torch.float32 and value.is_contiguous()


def agrees(cls: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> bool:
    """Whether the fused step does what the other does, with the options of a group. Tried out once for each kind of options.

    Args:
        cls: Of `FUSED`.
        group: Of an optimizer of that class.
    """
    options = {name: value for name, value in group.items() if name not in _CHOICES}
    kind = (cls, *((name, type(value), _is_on(value)) for name, value in options.items()))
    verdict = _verdicts.get(kind)
    if verdict is None:
        verdict = _verdicts[kind] = _try_out(cls, options)
    return verdict


def _is_on(value: Any) -> bool:
    try:
        return bool(value)
    except (RuntimeError, ValueError):  # of something with several elements
        return True


@torch.no_grad()
def _try_out(cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> bool:
    """Step both, on vectors that fill registers and threads, and some that do not."""
    starts = [_numbers(length, length) for length in (1, 67, 4099)]
    ends = []
    for choice in ({"fused": False, "foreach": False}, {"fused": True}):
        parameters = [start.clone().requires_grad_() for start in starts]
        copied = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        try:
            optimizer = cls([{"params": parameters, **copied, **choice}], lr=0.1)  # type: ignore[call-arg]
            # Without the hooks that the program may have for steps of all optimizers.
            step = getattr(cls.step, "__wrapped__", cls.step)
            for number in range(1, 4):
                for parameter in parameters:
                    parameter.grad = _numbers(parameter.numel(), number) * number
                step(optimizer)
        except Exception:
            return False  # it does not know an option; what is wrong with the options is for the user's own step to say
        ends.append(parameters)
    return all(
        bool((one - other).abs().max() <= TOLERANCE * (one - start).abs().max())
        for start, one, other in zip(starts, *ends, strict=True)
    )


def _numbers(count: int, seed: int) -> torch.Tensor:
    """Numbers from -1 to 1, the same on all ranks; the program's random numbers are left alone."""
    return torch.linspace(1, 13 + seed % 7, count, dtype=torch.float32, device="cpu").sin()
