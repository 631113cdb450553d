"""The variants of the step benchmark. Each variant trains a model on all ranks in its own way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from mpi4py import MPI
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import hvdlite_torch
from benchmarks.backends import NO_HOROVOD
from benchmarks.models import MakeOptimizer, train
from benchmarks.plan import (
    ALONE,
    ALONE_SMALL,
    ALONE_TUNED,
    DDP,
    DDP_TUNED,
    FLAT,
    HOROVOD,
    HVDLITE,
    OVERLAP,
    SHARD,
    VARIANTS,
    ZERO,
)
from hvdlite_torch.tensors.malloc import tell_malloc

HOW: Mapping[str, dict[str, Any]] = {HVDLITE: {}, SHARD: {"shard": True}, OVERLAP: {"overlap": True}}
"""The options of `hvdlite_torch.DistributedOptimizer` by the variant."""


class Missing(Exception):
    """A variant does not exist on this machine. The text says why."""


@dataclass
class Variant:
    """A model in training.

    Attributes:
        model: The model whose weights are trained.
        module: The module that is called with a batch: the model, or a wrapper of it.
        optimizer: The optimizer that applies the gradients.
        exchange: A function that is called between the backward pass and the optimizer's step.
    """

    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    exchange: Callable[[], None] = field(default=lambda: None)

    def step(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        train(self.module, batch)
        self.exchange()
        self.optimizer.step()


def make(name: str, model: nn.Module, make_optimizer: MakeOptimizer, horovod: ModuleType | None) -> Variant:
    """Return the variant `name` of `plan.VARIANTS` for a model. Every rank calls it, for torch's DDP after `start_gloo`.

    Raises:
        Missing: The variant does not exist on this machine.
    """
    if name in (DDP, DDP_TUNED, ZERO):
        # DDP's best setting: gradients are views of the buckets, which saves two copies of the gradients.
        wrapped = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, forward_sync_buffers=name == DDP
        )
        optimizer = make_optimizer(model)
        if name != DDP:
            tune(optimizer)
        return Variant(model, wrapped, sharded(optimizer) if name == ZERO else optimizer)
    optimizer = make_optimizer(model)
    if name == ALONE:
        return Variant(model, model, optimizer)
    if name in (ALONE_TUNED, ALONE_SMALL):
        tune(optimizer)
        return Variant(model, model, optimizer)
    if name in HOW:
        return Variant(model, model, hvdlite_torch.DistributedOptimizer(optimizer, **HOW[name]))
    if name == FLAT:
        return Variant(model, model, optimizer, FlatAllreduce(model))
    if name == HOROVOD:
        if horovod is None:
            raise Missing(NO_HOROVOD)
        distributed = horovod.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        return Variant(model, model, distributed)
    raise ValueError(f"no variant {name!r}: there are {', '.join(VARIANTS.values())}.")


def tune(optimizer: torch.optim.Optimizer) -> None:
    """Let the step be torch's fused one, and freed memory stay with this process. hvdlite sees to both by itself."""
    tell_malloc()
    for group in optimizer.param_groups:
        group["fused"] = True


def sharded(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return torch's ZeroRedundancyOptimizer with the class, the parameters and the options of an optimizer without state."""
    (group,) = optimizer.param_groups
    options = {
        name: group[name] for name in inspect.signature(type(optimizer)).parameters if name in optimizer.defaults
    }
    return ZeroRedundancyOptimizer(group["params"], type(optimizer), parameters_as_bucket_view=True, **options)


class FlatAllreduce:
    """Exchanges gradients as users do by hand: by copies into a flat array, MPI's Allreduce, and views of the array."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._sizes = [parameter.numel() for parameter in self._parameters]
        self._flat = torch.empty(sum(self._sizes))
        self._array = self._flat.numpy()

    def __call__(self) -> None:
        gradients = [parameter.grad for parameter in self._parameters]
        torch.cat([gradient.flatten() for gradient in gradients if gradient is not None], out=self._flat)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, self._array, MPI.SUM)
        self._flat /= MPI.COMM_WORLD.size
        for parameter, piece in zip(self._parameters, torch.split(self._flat, self._sizes), strict=True):
            parameter.grad = piece.view(parameter.shape)
