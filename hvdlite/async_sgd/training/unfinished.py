"""The trainings that a program has not finished: it serves them, or they are finished when this rank leaves the job."""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol
from weakref import WeakKeyDictionary

from hvdlite.api import before_leaving, rank, world
from hvdlite.errors import ArgumentError
from hvdlite.runtime.world import World


class Training(Protocol):
    """One rank's part in a training.

    Attributes:
        is_server: Whether this rank only serves.
    """

    is_server: bool

    def finish(self) -> None:
        """Wait until all ranks of the training have come to its end; until then, a rank that only serves answers the others."""
        ...


_unfinished: WeakKeyDictionary[World, list[Training]] = WeakKeyDictionary()
"""For each world (tests have several), its trainings, in the order in which they began."""


def note(here: World, training: Training) -> None:
    """Note that a training has begun. All its ranks call this."""
    here.has_servers = True
    _unfinished.setdefault(here, []).append(training)


def forget(here: World, training: Training) -> None:
    """Note that a training is over, or has failed."""
    _unfinished[here].remove(training)


def serve_parameters() -> None:
    """Serve the parameters of all optimizers of this rank until the workers have finished. A rank that only serves calls this.

    The rank has made the same `AsyncDistributedOptimizer` as the workers before. `is_server` tells which ranks these are.

    Raises:
        ArgumentError: This rank trains, or has made no such optimizer.
        HvdliteError: A server has failed, or a rank has left the job, or the ranks have called different things.

    Examples:
        >>> import torch, hvdlite_torch
        >>> def trained():
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     optimizer = hvdlite_torch.AsyncDistributedOptimizer(torch.optim.SGD([weight], lr=1.0), servers=1)
        ...     if optimizer.is_server:
        ...         return hvdlite_torch.serve_parameters()
        ...     weight.sum().backward()
        ...     optimizer.step()
        ...     optimizer.finish()
        ...     return weight.item()
        >>> on_ranks(3, trained)
        [-2.0, -2.0, None]
    """
    trainings = _unfinished.get(world("serve_parameters()"), [])
    if any(not training.is_server for training in trainings):
        raise ArgumentError(f"serve_parameters(): rank {rank()} trains: call this only where hvd.is_server() is True.")
    if not trainings:
        raise ArgumentError(
            f"serve_parameters(): rank {rank()} has no parameters to serve. Make the same AsyncDistributedOptimizer as the "
            "ranks that train before, on all ranks."
        )
    _finish(trainings)


def finish_all(here: World) -> None:
    """Finish what is not over. This waits until all ranks of each training have come to their end."""
    _finish(_unfinished.get(here, []))


def _finish(trainings: Sequence[Training]) -> None:
    trainings = list(trainings)
    if len(trainings) < 2 or not all(training.is_server for training in trainings):
        for training in trainings:
            training.finish()
        return
    # The workers meet the servers of each training when they want to, in any order.
    with ThreadPoolExecutor(len(trainings), "hvdlite-serve") as threads:
        for served in [threads.submit(contextvars.copy_context().run, each.finish) for each in trainings]:
            served.result()


before_leaving.append(finish_all)
