"""The arguments of `AsyncDistributedOptimizer`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hvdlite import ProcessSet
from hvdlite.async_sgd.server import Mode
from hvdlite.errors import ArgumentError, DistributedAlreadyError, UnsupportedTensorError
from hvdlite_torch.step.shardable import UNSHARDABLE, differs_alone, known_algorithm
from hvdlite_torch.step.wrapped import Distributed
from hvdlite_torch.tensors.sliced import is_sliced

Servers = int | Literal["sharded"]


@dataclass(frozen=True)
class Options:
    """The arguments.

    Attributes:
        mode, staleness, push_every, process_set: See `AsyncDistributedOptimizer`.
        servers: The ranks that hold parameters, as numbers in the process set.
        workers: The ranks that train, likewise.
    """

    mode: Mode
    staleness: int | None
    servers: tuple[int, ...]
    workers: tuple[int, ...]
    push_every: int
    process_set: ProcessSet


def make_options(
    mode: str, staleness: int | None, servers: Servers, push_every: int, process_set: ProcessSet, size: int
) -> Options:
    """Check the arguments and return them.

    Args:
        mode, staleness, servers, push_every, process_set: See `AsyncDistributedOptimizer`.
        size: The number of ranks in the process set.

    Raises:
        ArgumentError: An argument is wrong.
    """
    known = [each.value for each in Mode]
    if mode not in known:
        raise ArgumentError(f"mode={mode!r}: expected one of {', '.join(map(repr, known))}.")
    if mode == "ssp" and (not _is_count(staleness) or staleness is None or staleness < 0):
        raise ArgumentError(
            f'staleness={staleness!r}: mode="ssp" needs the number of steps that a rank may be ahead of the slowest, 0 or '
            "more, such as staleness=3."
        )
    if mode != "ssp" and staleness is not None:
        raise ArgumentError(
            f'staleness={staleness!r} is for mode="ssp"; got mode={mode!r}. Leave it out, or use mode="ssp".'
        )
    if not _is_count(push_every) or push_every < 1:
        raise ArgumentError(f"push_every={push_every!r}: expected a number of steps, 1 or more.")
    everybody = tuple(range(size))
    if servers == "sharded":
        return Options(Mode(mode), staleness, everybody, everybody, push_every, process_set)
    if not _is_count(servers) or isinstance(servers, str) or not 1 <= servers < size:
        raise ArgumentError(
            f'servers={servers!r}: expected "sharded" (every rank serves a part beside its training), or how many of the '
            f"{size} ranks only serve: 1 to {size - 1}, so that a rank is left to train."
        )
    return Options(Mode(mode), staleness, everybody[-servers:], everybody[:-servers], push_every, process_set)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_optimizer(given: object) -> None:
    """Raise an error unless servers can step parts of the parameters with an optimizer of this kind.

    Raises:
        DistributedAlreadyError: The optimizer is distributed already.
        ArgumentError: It is no optimizer of torch, or needs all gradients at once, or has nothing to train.
        UnsupportedTensorError: A parameter is a slice (DTensor), or has no memory.
    """
    if isinstance(given, Distributed) or hasattr(given, "_hvdlite_training"):
        raise DistributedAlreadyError("this optimizer is distributed already: wrap the plain one, and once.")
    if not isinstance(given, torch.optim.Optimizer):
        what = given.__name__ if isinstance(given, type) else f"a {type(given).__name__}"
        raise ArgumentError(
            f"AsyncDistributedOptimizer wraps an optimizer of torch; got {what}. Write "
            "hvd.AsyncDistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))."
        )
    name = type(given).__name__
    if isinstance(given, torch.optim.SparseAdam):
        raise ArgumentError("SparseAdam takes sparse gradients, and a parameter server takes dense ones: use Adam.")
    if isinstance(given, UNSHARDABLE):
        raise ArgumentError(
            f"{name} needs all gradients at once, and a server has those of its part: use DistributedOptimizer."
        )
    parameters = [p for group in given.param_groups for p in group["params"]]
    if any(is_sliced(p) for p in parameters):
        raise UnsupportedTensorError(
            "a parameter is a DTensor, of which this rank has a slice: use DistributedOptimizer."
        )
    if any(p.is_meta for p in parameters):
        raise UnsupportedTensorError("a parameter is on the device meta: give it memory first (model.to_empty).")
    if not any(p.requires_grad for p in parameters):
        raise ArgumentError("the optimizer has no parameters that require a gradient, so there is nothing to train.")
    if known_algorithm(type(given)) is None and (difference := differs_alone(given)):
        raise ArgumentError(
            f"{name} does not step each parameter by itself, and a server has a part of them. Tried out on small parameters, "
            f"{difference} if the others are not there. Use DistributedOptimizer."
        )
