"""The peers of the step benchmark: each trains one model on all ranks, in its own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

import hvdlite_torch
from benchmarks.backends import NO_HOROVOD
from benchmarks.models import MakeOptimizer, train
from benchmarks.plan import ALONE, ALONE_TUNED, DDP, FLAT, VARIANTS
from hvdlite_torch.tensors.malloc import keep_freed_memory


class Missing(Exception):
    """A variant does not exist here; says why."""


@dataclass
class Variant:
    """A model in training.

    Attributes:
        model: Whose weights are trained.
        module: What is called with a batch: the model, or what is wrapped around it.
        optimizer: Steps on the gradients.
        exchange: Called between backward and step.
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
    """A variant by its name in `plan.VARIANTS`, to train a model. Every rank calls this. DDP needs gloo started.

    Raises:
        Missing: It does not exist here.
    """
    if name == DDP:
        # Its best setting: gradients lie in the buckets, which spares two copies of them.
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return Variant(model, wrapped, make_optimizer(model))
    optimizer = make_optimizer(model)
    if name == ALONE:
        return Variant(model, model, optimizer)
    if name == ALONE_TUNED:
        keep_freed_memory()
        for group in optimizer.param_groups:
            group["fused"] = True
        return Variant(model, model, optimizer)
    if name == "hvdlite overlap":
        return Variant(model, model, hvdlite_torch.DistributedOptimizer(optimizer, overlap=True))
    if name == "hvdlite":
        return Variant(model, model, hvdlite_torch.DistributedOptimizer(optimizer))
    if name == "hvdlite shard":
        return Variant(model, model, hvdlite_torch.DistributedOptimizer(optimizer, shard=True))
    if name == FLAT:
        return Variant(model, model, optimizer, FlatAllreduce(model))
    if name == "Horovod":
        if horovod is None:
            raise Missing(NO_HOROVOD)
        distributed = horovod.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        return Variant(model, model, distributed)
    raise ValueError(f"no variant {name!r}: there are {', '.join(VARIANTS)}.")


class FlatAllreduce:
    """What one writes by hand: gradients into one flat array, MPI's allreduce of it, and gradients that are views of it."""

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
