"""`LayerHooks`: each layer of a model waits for its own new values before its forward pass."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite.async_sgd.training.pull import Values
from hvdlite.errors import ArgumentError


class LayerHooks:
    """The hooks of a model. A layer is a module that has parameters itself, and not only in its parts.

    Some parameters are used otherwise than by the forward pass of their module: `nn.MultiheadAttention` reads those of its
    `out_proj`. They have a gradient, although their module was not called. Those of the first step are learned. A
    parameter that shows this later was read while its new value was under way, which is an error.

    Args:
        model: The model.
        numbers: For each parameter that is trained, its number, by ``id(parameter)``.
        names: Their names.
        values: What was pulled. It is not kept alive.

    Attributes:
        early: The numbers of the parameters whose values each step waits for.
    """

    def __init__(self, model: torch.nn.Module, numbers: Mapping[int, int], names: list[str], values: Values) -> None:
        self._values: Callable[[], Values | None] = weakref.ref(values)
        self._names = names
        self._called: set[int] = set()
        self.early = set(numbers.values())
        self._hooks: list[RemovableHandle] = []
        parameters = {numbers[id(p)]: p for p in model.parameters() if id(p) in numbers}
        for module in model.modules():
            own = [numbers[id(p)] for p in module.parameters(recurse=False) if id(p) in numbers]
            if own:
                self.early.difference_update(own)
                self._hooks.append(module.register_forward_pre_hook(functools.partial(self._before, own)))
            self._hooks.append(module.register_state_dict_pre_hook(self._all))
        self._hooks += [
            p.register_post_accumulate_grad_hook(functools.partial(self._after, number))
            for number, p in parameters.items()
        ]

    def end_step(self) -> None:
        """Note that a step is over, and wait for what the layers do not wait for.

        Raises:
            HvdliteError: A server has failed, or a rank has left the job.
        """
        self._called.clear()
        if values := self._values():
            values.take(self.early)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_training, ()

    def _before(self, own: list[int], *_: Any) -> None:
        self._called.update(own)
        if values := self._values():
            values.take(own)

    def _all(self, *_: Any) -> None:
        if values := self._values():
            values.take_all()

    def _after(self, number: int, _: torch.Tensor) -> None:
        values = self._values()
        if number in self._called or number in self.early or values is None:
            return
        if values.is_pending(number):
            raise ArgumentError(
                f"overlap_pull=True: {self._names[number]} was used without a call of its module while its new value was "
                "under way, so this gradient is that of an old value. Call the module, or optimizer.wait() before, or leave "
                "out overlap_pull."
            )
        self.early.add(number)


def _without_training() -> LayerHooks:
    """Return what the hooks of a copied or saved model belong to: nobody trains it."""
    made = LayerHooks.__new__(LayerHooks)
    made._values, made._called = _nothing, set()
    return made


def _nothing() -> None:
    return None
