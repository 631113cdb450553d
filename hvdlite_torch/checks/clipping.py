"""Clipping before the exchange: each rank by its own gradients, which is not what one process does.

torch's functions change gradients and say nothing about it, so they are told here what to look for. They clip as ever.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad


class Advised(Protocol):
    """Whose program is advised."""

    def trains_any_of(self, parameters: AbstractSet[int]) -> bool:
        """Whether some of these parameters, given by their ``id``, are trained here."""

    def advise_on_clipping(self, called: str, how: str) -> bool:
        """Gradients are being clipped, by the function `called`. Returns whether that was the time for advice."""


_watched: weakref.WeakSet[Advised] = weakref.WeakSet()
"""Those whose program may still be advised."""
_lock = threading.Lock()

# Within the function that programs import, so that it does not matter when and by which name they have.
_INNERMOST = "_clip_grads_with_norm_" if hasattr(clip_grad, "_clip_grads_with_norm_") else "clip_grad_norm_"


def watch(exchange: Advised) -> None:
    """Advise the program of this exchange, once, if it clips gradients that are not combined yet."""
    with _lock:
        _watched.add(exchange)
    _teach(clip_grad, _INNERMOST, "clip_grad_norm_", "by the norm of this rank's gradients alone")
    for place in (clip_grad, torch.nn.utils):
        _teach(place, "clip_grad_value_", "clip_grad_value_", "this rank's gradients alone")


def _teach(place: Any, name: str, called: str, how: str) -> None:
    clip = getattr(place, name)
    if hasattr(clip, "_hvdlite"):
        return

    @functools.wraps(clip)
    def tell_and_clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if _watched:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            _tell(parameters, called, how)
        return clip(parameters, *args, **kwargs)

    tell_and_clip._hvdlite = True  # type: ignore[attr-defined]
    setattr(place, name, tell_and_clip)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _tell(parameters: Iterable[Any], called: str, how: str) -> None:
    clipped = set(map(id, parameters))
    with _lock:
        watched = list(_watched)
    for exchange in watched:
        if exchange.trains_any_of(clipped) and exchange.advise_on_clipping(called, how):
            with _lock:
                _watched.discard(exchange)
