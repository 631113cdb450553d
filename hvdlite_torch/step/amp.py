"""torch's GradScaler on several ranks: all ranks must find the same overflows and skip the same steps.

`GradScaler.unscale_` looks for infinities in ``p.grad``. It must see the combined gradients, which are the same on all ranks.
So the gradients of a distributed optimizer are combined before it looks. torch has no hook there. This is the only place where
hvdlite changes a class of torch; optimizers that are not distributed behave as before, unless their model is split over ranks:
then an infinity in one slice or stage is one of the whole model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

import hvdlite
from hvdlite import ProcessSet
from hvdlite.async_sgd.server import Mode
from hvdlite.errors import ArgumentError
from hvdlite_torch.tensors.sliced import is_sliced, local_of, slices_have_gradients
from hvdlite_torch.tensors.split import any_stages, is_split, join_count, optimizer_parameters


def teach_grad_scaler() -> None:
    """Let each GradScaler of this process call distributed optimizers before and after it unscales. This is done once."""
    scaler = torch.amp.GradScaler
    unscale, check = scaler._unscale_grads_, scaler._check_scale_growth_tracker
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
        _refuse_servers(optimizer)
        parameters = optimizer_parameters(optimizer)
        distributed, split = hasattr(optimizer, "_hvdlite_driver"), is_split(parameters)
        if not distributed and not split:
            return unscale(self, optimizer, inv_scale, found_inf, *args, **kwargs)
        if distributed:
            optimizer._hvdlite_before_unscale()  # type: ignore[attr-defined]
        if any(map(is_sliced, parameters)):  # torch does not take slices and plain tensors together
            with slices_have_gradients(parameters):
                own: Any = SimpleNamespace(param_groups=[{"params": list(map(local_of, parameters))}])
                infinities = unscale(self, own, inv_scale, found_inf, *args, **kwargs)
        else:
            infinities = unscale(self, optimizer, inv_scale, found_inf, *args, **kwargs)
        if not infinities:  # this rank has no gradient, and other ranks may have some
            infinities[found_inf.device] = found_inf
        if distributed:
            optimizer._hvdlite_after_unscale(infinities.values())  # type: ignore[attr-defined]
        if split:
            for count in infinities.values():
                join_count(parameters, count)
        return infinities

    @functools.wraps(check)
    def begin_and_check(self: Any, name: str) -> Any:
        # A rank without the last stage has no loss to scale, by which torch's scaler begins.
        if self._scale is None and any_stages():
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return check(self, name)

    exchange_and_unscale._hvdlite = True  # type: ignore[attr-defined]
    scaler._unscale_grads_ = exchange_and_unscale  # type: ignore[method-assign]
    scaler._check_scale_growth_tracker = begin_and_check  # type: ignore[method-assign, assignment]


def _refuse_servers(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError for an optimizer whose server pairs the steps of all ranks, of which a GradScaler leaves some out."""
    training = getattr(optimizer, "_hvdlite_training", None)
    if training is not None and training.options.mode is Mode.SYNC:
        raise ArgumentError(
            'AsyncDistributedOptimizer(mode="sync") with a GradScaler: a rank that overflows would leave out its step, and its '
            "next one would be paired with this one of the others. Use DistributedOptimizer, with which all ranks leave out "
            "the same steps; or bfloat16, which needs no GradScaler."
        )


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
