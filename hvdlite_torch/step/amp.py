"""torch's GradScaler on several ranks: all of them must find the same overflows, and skip the same steps.

`GradScaler.unscale_` looks for infinities in ``p.grad``. It must see the combined gradients, which are the same everywhere,
so those of a distributed optimizer are exchanged before. torch offers no hook there; this is the one place where hvdlite
changes a class of torch, and optimizers that are not distributed do not notice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import hvdlite
from hvdlite import ProcessSet


def teach_grad_scaler() -> None:
    """Let every GradScaler of this process ask distributed optimizers before and after. More calls do nothing."""
    scaler = torch.amp.GradScaler
    unscale = scaler._unscale_grads_
    if hasattr(unscale, "_hvdlite"):
        return

    @functools.wraps(unscale)
    def exchange_and_unscale(
        self: Any,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not hasattr(optimizer, "_hvdlite_driver"):
            return unscale(self, optimizer, inv_scale, found_inf, *args, **kwargs)
        optimizer._hvdlite_before_unscale()  # type: ignore[attr-defined]
        infinities = unscale(self, optimizer, inv_scale, found_inf, *args, **kwargs)
        if not infinities:  # not a gradient, where others may have some
            infinities[found_inf.device] = found_inf
        optimizer._hvdlite_after_unscale(infinities.values())  # type: ignore[attr-defined]
        return infinities

    exchange_and_unscale._hvdlite = True  # type: ignore[attr-defined]
    scaler._unscale_grads_ = exchange_and_unscale  # type: ignore[method-assign]


def finish_unscaling(optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor]) -> None:
    """Do now what a GradScaler has left to the fused step of an optimizer that was made with ``fused=True``.

    Args:
        optimizer: It may have been told the scale, and is told now that there is nothing left to do.
        gradients: All that it will use, dense; overwritten.
    """
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        if gradients:
            torch._foreach_div_(list(gradients), scale)
        optimizer.grad_scale = None  # type: ignore[attr-defined]


def share_infinities(found: Iterable[torch.Tensor], process_set: ProcessSet) -> None:
    """Let all ranks skip a step if one of them does, where each looked at gradients of its own.

    Args:
        found: What a GradScaler has counted on this rank, for each device; overwritten.
        process_set: The ranks that step together.
    """
    for count in found:
        hvdlite.allreduce(count, hvdlite.Sum, inplace=True, process_set=process_set)
