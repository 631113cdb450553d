"""What is to happen if a rank of a training fails: the arguments of `AsyncDistributedOptimizer` for that, checked."""

from __future__ import annotations

import os
from pathlib import Path

from hvdlite.api import rank, world
from hvdlite.async_sgd.training.checkpoint import check_path
from hvdlite.errors import ArgumentError
from hvdlite.ranks.process_set import ProcessSet


def check_failures(
    on_worker_loss: str, checkpoint: str | os.PathLike[str] | None, process_set: ProcessSet
) -> tuple[bool, Path | None]:
    """Check the arguments, and return whether the training goes on without workers that fail, and the path of the checkpoint.

    Args:
        on_worker_loss, checkpoint, process_set: See `AsyncDistributedOptimizer`.

    Raises:
        ArgumentError: An argument is wrong, or this job cannot do that.
    """
    if on_worker_loss not in ("end", "go on"):
        raise ArgumentError(f"on_worker_loss={on_worker_loss!r}: expected 'end' or 'go on'.")
    goes_on = on_worker_loss == "go on"
    if goes_on:
        _check_goes_on(process_set)
    if checkpoint is None:
        return goes_on, None
    _check_launcher("checkpoint=")
    path = Path(checkpoint).absolute()
    if rank() in world().ranks(process_set):
        check_path(path)
    return goes_on, path


def _check_launcher(argument: str) -> None:
    if not world().config.control:
        raise ArgumentError(
            f"{argument} needs hvdliterun, which learns that a rank has failed, and tells the others: start the job with "
            "hvdliterun -np N train.py."
        )


def _check_goes_on(process_set: ProcessSet) -> None:
    argument, here = 'on_worker_loss="go on"', world()
    _check_launcher(argument)
    if len(here.ranks(process_set)) < here.topology.size:
        raise ArgumentError(f"{argument} is for all ranks of the job, for all must know of a loss; got {process_set}.")
    if len(set(here.hosts)) > 1:
        raise ArgumentError(
            f"{argument} needs all ranks on one host: between hosts MPI ends a job that has lost a rank. These are on "
            f"{len(set(here.hosts))} hosts."
        )
    if "Open MPI" not in here.describe():
        raise ArgumentError(
            f"{argument} needs Open MPI, which does not end a job that has lost a rank; got {here.describe()}."
        )
