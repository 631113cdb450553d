"""`LocalSGD` and `DiLoCo`: how often ranks that train by themselves bring their parameters together, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hvdlite.errors import ArgumentError

MakeOuter = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class LocalSGD:
    """Each rank makes steps of its own. After `every` of them, all ranks go on with the mean of their parameters.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767. With ``every=1`` and plain SGD this is
    training with averaged gradients. Each rank keeps its own optimizer state.

    Args:
        every: The number of steps from one mean to the next.

    Raises:
        ArgumentError: `every` is no number from 1 on.
    """

    every: int = 8

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ArgumentError(f"{type(self).__name__}(every={self.every!r}): expected a number of steps from 1 on.")


def nesterov(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the outer optimizer of the paper on DiLoCo."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """The same, but the mean is only the direction in which an outer optimizer steps.

    The outer gradient is the difference of the parameters before the steps and the mean after them (Douillard et al., "DiLoCo:
    Distributed Low-Communication Training of Language Models", arXiv:2311.08105). All ranks make the same outer step. With
    ``compression=hvd.Compression.fp16`` (or bf16) of the optimizer the outer gradient is rounded before it travels.

    Args:
        every: The number of steps from one outer step to the next.
        outer: Makes the outer optimizer of a list of parameters; SGD with Nesterov momentum 0.9 and learning rate 0.7, as in
            the paper, by default.
    """

    every: int = 64
    outer: MakeOuter = nesterov
