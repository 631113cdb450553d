"""`Hooks`: hooks of parameters, which see the gradient of a whole batch, also where it comes in micro-batches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


class Hooks:
    """The hooks on the gradients of parameters: those of the program, and those of optimizers.

    Args:
        parameters: The parameters.

    Attributes:
        are_of_program: Whether some are not of hvdlite.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
        found = [_module_of(hook) for hooks in self._dicts() for hook in hooks.values()]
        self.are_of_program = not all(module.startswith("hvdlite") for module in found)

    def _dicts(self) -> list[dict[int, Any]]:
        """Return torch's own dicts of hooks, to which it and the handles refer."""
        every = ((p._backward_hooks, p._post_accumulate_grad_hooks) for p in self._parameters)
        return [hooks for both in every for hooks in both if hooks]

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Return a context manager: in its body torch calls none of the hooks."""
        every = self._dicts()
        own = [dict(hooks) for hooks in every]
        for hooks in every:
            hooks.clear()
        try:
            yield
        finally:
            for hooks, those in zip(every, own, strict=True):
                hooks.update(those)

    @torch.no_grad()
    def change_gradients(self) -> None:
        """Call what `register_hook` has registered, with the gradients that there are."""
        for parameter in self._parameters:
            for hook in list((parameter._backward_hooks or {}).values()):
                if parameter.grad is not None and (changed := hook(parameter.grad)) is not None:
                    parameter.grad = changed

    @torch.no_grad()
    def tell(self, parameters: Iterable[nn.Parameter]) -> None:
        """Call what `register_post_accumulate_grad_hook` has registered.

        Args:
            parameters: Those whose gradients have been accumulated.
        """
        accumulated = set(map(id, parameters))
        for parameter in self._parameters:
            if id(parameter) in accumulated:
                for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                    hook(parameter)


def _module_of(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or ""
