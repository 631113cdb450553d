"""Whether an optimizer steps each parameter by itself. torch's own optimizers are known; others are tried out.

Nobody can see from outside which gradients the step of an optimizer reads. So it steps small parameters, together and each
alone: an optimizer that reads all gradients, such as for a norm over all of them, then does something else.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections import OrderedDict, defaultdict
from typing import Any

import torch

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
)
"""The optimizers that step each element by itself."""

PARAMETERWISE = frozenset(getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name))
"""The optimizers that step each parameter by itself."""

_STEPS = 16
_TRIED = 2  # the number of parameters of each group that are tried
_LENGTH = 5  # the largest length of their dimensions


def known_algorithm(cls: type) -> type | None:
    """Return the optimizer class of torch whose step a class inherits unchanged; None if there is none.

    The user's class may have another constructor, and methods that torch's own methods do not call.
    """
    for base in cls.__mro__:
        if base in ELEMENTWISE or base in PARAMETERWISE:
            own = {name for each in cls.__mro__[: cls.__mro__.index(base)] for name in vars(each)}
            called = {name for name in own if hasattr(base, name) and not name.startswith("__") and name != "zero_grad"}
            return base if all(_bare(cls, name) is _bare(base, name) for name in called) else None
    return None


def _bare(cls: type, name: str) -> Any:
    """Return a method without the wrappers that torch has put around it."""
    member = inspect.getattr_static(cls, name)
    return inspect.unwrap(member) if callable(member) else member


# Trying out


_generator = threading.Lock()
"""The threads of a process share torch's random number generator."""


def differs_alone(optimizer: torch.optim.Optimizer) -> str | None:
    """Return a text that says what changes if an optimizer has only one parameter.

    The text is empty if nothing changes. It is None if the optimizer cannot be tried out.
    """
    chosen = [p for group in optimizer.param_groups for p in [q for q in group["params"] if q.requires_grad][:_TRIED]]
    with _generator, torch.random.fork_rng(devices=[]):
        try:
            together = _steps(optimizer, None)
        except Exception:
            return None  # it needs a closure, for example
        for parameter in chosen:
            shape = tuple(parameter.shape)
            try:
                alone = _steps(optimizer, parameter)
            except Exception as error:
                return f"it fails for one of shape {shape} ({type(error).__name__}: {error})"
            changed, settings = alone[id(parameter)]
            if not _are_equal(changed, together[id(parameter)][0]):
                return f"it changes one of shape {shape} in another way"
            if not _are_equal(settings, together[id(parameter)][1]):
                return "it comes to other settings (in its groups)"
    return ""


def _steps(
    optimizer: torch.optim.Optimizer, alone: torch.Tensor | None
) -> dict[int, tuple[torch.Tensor, dict[str, Any]]]:
    """Step a copy of an optimizer that has small parameters instead of its own.

    Args:
        optimizer: The optimizer, which is left alone.
        alone: The one parameter that the copy has; None if the copy has all.

    Returns:
        For each parameter of the copy, by the ``id`` of the original one: its values and the settings of its group, at the end.
    """
    generator = torch.Generator().manual_seed(0)
    small: dict[int, Any] = {}
    gradients = []
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        # Numbers are drawn for all parameters, so that each parameter gets the same ones every time.
        shape = [min(length, _LENGTH) for length in parameter.shape]
        numbers = [torch.randn(shape, generator=generator).to(parameter) for _ in range(1 + _STEPS)]
        small[id(parameter)] = None
        if alone is None or parameter is alone:
            small[id(parameter)] = torch.nn.Parameter(numbers[0], parameter.requires_grad)
            gradients.append((number, small[id(parameter)], numbers[1:]))
    copied = copy_with(optimizer, small)
    if alone is None and len(gradients) == 1:
        company = torch.nn.Parameter(torch.ones(2).to(gradients[0][1]))
        gradients.append((1, company, [torch.ones_like(company)] * _STEPS))
        next(group["params"] for group in copied.param_groups if group["params"]).append(company)
    torch.manual_seed(0)
    for step in range(_STEPS):
        for number, parameter, numbers in gradients:
            # Lengths differ by parameter and step, so that a norm over all gradients changes each step.
            parameter.grad = numbers[step] * 10.0 ** ((step + 2 * number) % 5 - 2) if parameter.requires_grad else None
        copied.step()
    return {
        id(large): (small[id(large)].detach(), {name: value for name, value in its.items() if name != "params"})
        for group, its in zip(optimizer.param_groups, copied.param_groups, strict=True)
        for large in group["params"]
        if small[id(large)] is not None
    }


def copy_with(optimizer: torch.optim.Optimizer, parameters: dict[int, Any]) -> torch.optim.Optimizer:
    """Return a copy of an optimizer, without its state and hooks.

    Args:
        optimizer: The optimizer to copy.
        parameters: The copy's replacement of each parameter, by ``id``; None for a parameter that the copy does not have.
    """
    memo: dict[int, Any] = {**parameters, id(optimizer.state): defaultdict(dict)}
    groups = []
    for group in optimizer.param_groups:
        kept = [small for p in group["params"] if (small := parameters[id(p)]) is not None]
        settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        groups.append({**copy.deepcopy(settings, memo), "params": kept})
    memo[id(optimizer.param_groups)] = groups
    copied = type(optimizer).__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        copied.__dict__[name] = OrderedDict() if name.endswith("_hooks") else copy.deepcopy(value, memo)
    return copied


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal, where NaN equals NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    return bool(one == other) or (one != one and other != other)
