"""Trains on several ranks, and computes the expected parameters by plain torch replicas in one process with averaged gradients.

A test gives an `Idiom`: the part of a training step before ``optimizer.step()``. The idiom runs unchanged on the replicas,
where ``p.grad`` is plain torch's, and on the ranks, where the optimizer is distributed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hvdlite_torch as hvd

DTYPE = torch.float64
STEPS = 5

MakeOptimizer = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]


class Model(torch.nn.Module):
    """A model with matrices, vectors, a parameter of one element, and parameters of equal shapes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(0.5 * torch.randn(*shape, generator=generator, dtype=DTYPE))

        self.first, self.second = parameter(12, 12), parameter(12, 12)
        self.third = parameter(5, 12)
        self.bias, self.twin_bias = parameter(12), parameter(12)
        self.table, self.other_table = parameter(4, 12), parameter(4, 12)
        self.scale = parameter(1)

    def forward(self, x: torch.Tensor, added: bool = False) -> torch.Tensor:
        """Return an array of shape (n, 4, 5).

        Args:
            x: The inputs, of shape (n, 4, 12).
            added: Whether to add parameters to each other first, as a transformer does with positions and types. autograd then
                gives the gradients of these parameters the same memory.
        """
        if added:
            x = x + (self.table[None] + self.other_table[None])
            x = torch.tanh(x @ self.first + (self.bias[None] + self.twin_bias[None]))
        else:
            x = torch.tanh((x + self.table + self.other_table) @ self.first + self.bias + self.twin_bias)
        return torch.tanh(x @ self.second) @ self.third.t() * self.scale


MODEL = Model()


class Job:
    """The state of the program on one rank.

    Args:
        rank: The rank.
        make: Makes the plain optimizer of parameters.
        wrap: Returns the distributed optimizer for the plain one, or the plain one.

    Attributes:
        make, wrap: The arguments.
        step: The number of the present step.
        kept: The values that an idiom keeps between steps.
    """

    def __init__(
        self, rank: int, make: MakeOptimizer, wrap: Callable[[Any], Any] = lambda optimizer: optimizer
    ) -> None:
        self.rank = rank
        self.model = copy.deepcopy(MODEL)
        self.parameters = list(self.model.parameters())
        self.make, self.wrap = make, wrap
        self.optimizer = wrap(make(self.parameters))
        self.step = 0
        self.kept: dict[str, Any] = {}

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def loss(self, of: int = 0, added: bool = False) -> torch.Tensor:
        """Return the loss of this rank's rows in this step."""
        generator = torch.Generator().manual_seed(1000 * of + 10 * self.step + self.rank)
        x = torch.randn(3, 4, 12, generator=generator, dtype=DTYPE)
        return ((self.model(x, added) - 0.1 * (1 + of)) ** 2).mean()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()


Idiom = Callable[[Job], None]


@functools.cache
def truth(idiom: Idiom, make: MakeOptimizer, size: int) -> list[torch.Tensor]:
    """Return the parameters after `STEPS` steps of `size` plain replicas."""
    jobs = [Job(rank, make) for rank in range(size)]
    for step in range(STEPS):
        for job in jobs:
            job.step = step
            idiom(job)
        for parameters in zip(*(job.parameters for job in jobs), strict=True):
            _average(parameters)
        for job in jobs:
            job.optimizer.step()
    return [p.detach().clone() for p in jobs[0].parameters]


@torch.no_grad()
def _average(replicas: Sequence[torch.Tensor]) -> None:
    there = [p.grad.detach().clone() for p in replicas if p.grad is not None]
    if not there:
        return
    mean = torch.stack(there).sum(0) / len(replicas)
    for p in replicas:
        if p.grad is not None and not p.grad.requires_grad and 0 not in p.grad.stride():
            p.grad.copy_(mean)
        else:
            p.grad = mean.clone()


def on_this_rank(idiom: Idiom, make: MakeOptimizer, **options: Any) -> list[torch.Tensor]:
    """Return this rank's parameters after the same steps with a distributed optimizer."""
    job = Job(hvd.rank(), make, lambda optimizer: hvd.DistributedOptimizer(optimizer, **options))
    for step in range(STEPS):
        job.step = step
        idiom(job)
        job.optimizer.step()
    return [p.detach().clone() for p in job.parameters]


def distance(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Return the largest absolute difference; NaN if there is one."""
    return float(torch.stack([(one - other).abs().max() for one, other in zip(ones, others, strict=True)]).max())
