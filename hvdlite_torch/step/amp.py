"""torch's GradScaler on several ranks: all ranks must find the same overflows and skip the same steps.

`GradScaler.unscale_` looks for infinities in ``p.grad``. It must see the combined gradients, which are the same on all ranks.
So the gradients of a distributed optimizer are combined before it looks. torch has no hook there. This is the only place where
hvdlite changes a class of torch; optimizers that are not distributed behave as before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import hvdlite
from hvdlite import ProcessSet


def teach_grad_scaler() -> None:
    """Let each GradScaler of this process call distributed optimizers before and after it unscales. This is done once."""
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
        if not infinities:  # this rank has no gradient, and other ranks may have some
            infinities[found_inf.device] = found_inf
        optimizer._hvdlite_after_unscale(infinities.values())  # type: ignore[attr-defined]
        return infinities

    exchange_and_unscale._hvdlite = True  # type: ignore[attr-defined]
    scaler._unscale_grads_ = exchange_and_unscale  # type: ignore[method-assign]


def finish_unscaling(optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor]) -> None:
    """Unscale the gradients now, if a GradScaler has left that to the fused step of an optimizer made with ``fused=True``.

    Args:
        optimizer: Its attribute ``grad_scale`` is set to None when the gradients are unscaled.
        gradients: All gradients that the step uses. They are dense, and are overwritten.
    """
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        if gradients:
            torch._foreach_div_(list(gradients), scale)
        optimizer.grad_scale = None  # type: ignore[attr-defined]


def share_infinities(found: Iterable[torch.Tensor], process_set: ProcessSet) -> None:
    """Let all ranks skip a step if one rank has found an infinity in its own gradients.

    Args:
        found: The numbers of infinities that a GradScaler has counted on this rank, one tensor for each device. Each is
            overwritten with the sum over all ranks.
        process_set: The ranks that step together.
    """
    for count in found:
        hvdlite.allreduce(count, hvdlite.Sum, inplace=True, process_set=process_set)
