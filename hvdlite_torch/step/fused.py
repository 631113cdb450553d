"""`FusedStep` switches to torch's fused step, where the program leaves the choice of implementation to torch.

A fused step goes through memory once where the other implementations go several times, on CPUs too; the results differ in the
last bit. It does not look at strides, shapes and dtypes, so the parameter, the gradient and the state must lie in the same
order, or the result is wrong. With some dtypes it is wrong in any case (SGD of torch 2.13 leaves most bfloat16 elements
unchanged), and with others it is less exact than torch's default. So it is used for float32 only, and only after a trial.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from hvdlite_torch.tensors.adapter import are_same
from hvdlite_torch.tensors.sliced import is_sliced

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""The optimizers that have a fused step on CPUs."""

TOLERANCE = 1e-5
"""The largest difference of the two implementations after a few steps, relative to how far the parameters have moved."""

_CHOICES = ("params", "param_names", "fused", "foreach", "differentiable")
"""The keys of a parameter group that are no options of the algorithm."""

_verdicts: dict[Hashable, bool] = {}


class FusedStep:
    """Switches an optimizer's groups to the fused implementation, and back.

    Args:
        optimizer: An optimizer of any class; one that is not in `FUSED` is left alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._class = next((cls for cls in FUSED if isinstance(optimizer, cls)), None)
        self._switched: list[dict[str, object]] = []
        # Programs may put anything into the state, at any time. Values that were checked once need no second check.
        self._seen: list[object] | None = None
        self._state_is_plain = True
        # The parameters of each group that need no check at each step: there may be thousands.
        self._in_host_memory: dict[int, list[torch.Tensor]] = {}
        self._with_momentum: dict[int, list[torch.Tensor]] = {}

    def switch(self) -> None:
        """Let the next step be fused, in the groups whose tensors are plain and for which the program has made no choice."""
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
        # If a model was moved to another device, all its parameters were moved.
        moved = bool(parameters) and not parameters[0].is_cpu
        if moved or not are_same(parameters, self._in_host_memory.get(number)):
            if not all(parameter.is_cpu and not is_sliced(parameter) for parameter in parameters):
                return False
            self._in_host_memory[number] = list(parameters)
        gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
        return all(
            [t.dtype is torch.float32 and t.is_contiguous() for tensors in (parameters, gradients) for t in tensors]
        )

    def _is_supported(self, number: int, group: dict[str, Any]) -> bool:
        """Return whether torch's fused step can step a group. SGD cannot if only some parameters have a momentum buffer."""
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
        """Leave the choice of implementation to torch again."""
        for group in self._switched:
            group["fused"] = None
        self._switched.clear()


def _is_like(value: object, parameter: torch.Tensor) -> bool:
    """Return whether a value of the state is a number, or is contiguous float32 of the parameter's shape."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return True
    return value.shape == parameter.shape and value.dtype is torch.float32 and value.is_contiguous()


def agrees(cls: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> bool:
    """Return whether the fused step does what the default step does, with a group's options. Try each kind once.

    Args:
        cls: An optimizer in `FUSED`.
        group: A parameter group of an optimizer of that class.
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
    except (RuntimeError, ValueError):  # the value has several elements
        return True


@torch.no_grad()
def _try_out(cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> bool:
    """Step with both implementations, on vectors that fill vector registers and threads, and on some that do not."""
    starts = [_numbers(length, length) for length in (1, 67, 4099)]
    ends = []
    for choice in ({"fused": False, "foreach": False}, {"fused": True}):
        parameters = [start.clone().requires_grad_() for start in starts]
        copied = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        try:
            optimizer = cls([{"params": parameters, **copied, **choice}], lr=0.1)  # type: ignore[call-arg]
            # Leave out the hooks that the program may have registered for all optimizers.
            step = getattr(cls.step, "__wrapped__", cls.step)
            for number in range(1, 4):
                for parameter in parameters:
                    parameter.grad = _numbers(parameter.numel(), number) * number
                step(optimizer)
        except Exception:
            return False  # it does not know an option; if the options are wrong, the program's own step raises
        ends.append(parameters)
    return all(
        bool((one - other).abs().max() <= TOLERANCE * (one - start).abs().max())
        for start, one, other in zip(starts, *ends, strict=True)
    )


def _numbers(count: int, seed: int) -> torch.Tensor:
    """Return numbers from -1 to 1, the same on all ranks, without torch's random number generator."""
    return torch.linspace(1, 13 + seed % 7, count, dtype=torch.float32, device="cpu").sin()
