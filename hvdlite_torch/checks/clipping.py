"""Warnings for programs that clip gradients before they are combined, or by a norm in which others are that nobody combines.

Each rank then clips by a norm of its own. Where the optimizer is sharded, clipping by a function is an error.

torch has no hook for clipping, so its functions are wrapped here. The wrapped functions clip as before.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad


class Advised(Protocol):
    """An object that exchanges gradients and warns its program."""

    def has(self) -> AbstractSet[int]:
        """Return the ``id`` of each of its parameters."""

    def advise_on_clipping(self, called: str, how: str) -> bool:
        """Warn that the function `called` is clipping gradients, if they are not combined yet. Return whether it warned.

        Raises:
            ArgumentError: Gradients cannot be clipped by a function: the text says how else.
        """

    def advise_on_others(self, called: str, others: Sequence[torch.Tensor]) -> None:
        """Warn that the function `called` clips by a norm in which the gradients of others are, which nobody combines."""


_watched: weakref.WeakSet[Advised] = weakref.WeakSet()
_warned: weakref.WeakSet[Advised] = weakref.WeakSet()
"""Those of the watched objects whose program has been warned."""
_lock = threading.Lock()

# A function within the one that programs import is wrapped, so that it does not matter when and by which name they import it.
_INNERMOST = "_clip_grads_with_norm_" if hasattr(clip_grad, "_clip_grads_with_norm_") else "clip_grad_norm_"


def watch(exchange: Advised) -> None:
    """Warn the program of this exchange, once, if it clips gradients that are not combined."""
    with _lock:
        _watched.add(exchange)
    _teach(_INNERMOST, "clip_grad_norm_", "by the norm of this rank's gradients alone")
    _teach("clip_grad_value_", "clip_grad_value_", "this rank's gradients alone")


def _teach(name: str, called: str, how: str) -> None:
    clip = getattr(clip_grad, name)
    if hasattr(clip, "_hvdlite"):
        return

    @functools.wraps(clip)
    def tell_and_clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if _watched:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            _tell(parameters, called, how)
        return clip(parameters, *args, **kwargs)

    tell_and_clip._hvdlite = True  # type: ignore[attr-defined]
    for place in (clip_grad, torch.nn.utils):  # one function in both, so that whoever wraps it too finds it in both
        if getattr(place, name, None) is clip:
            setattr(place, name, tell_and_clip)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _tell(parameters: Sequence[Any], called: str, how: str) -> None:
    clipped = set(map(id, parameters))
    with _lock:
        concerned = {exchange: has for exchange in _watched if (has := exchange.has()) & clipped}
        unwarned = [exchange for exchange in concerned if exchange not in _warned]
    for exchange in unwarned:
        warned = exchange.advise_on_clipping(called, how)
        if not warned and called == "clip_grad_norm_" and (others := _others(parameters, concerned.values())):
            exchange.advise_on_others(called, others)
            warned = True
        if warned:
            with _lock:
                _warned.add(exchange)


def _others(parameters: Sequence[Any], combined: Iterable[AbstractSet[int]]) -> list[Any]:
    """Return the parameters with a gradient that none of these has."""
    known = set().union(*combined)
    return [each for each in parameters if id(each) not in known and each.grad is not None]
