"""What one rank of a training does when ranks fail, and the arguments of `AsyncDistributedOptimizer` for that, checked."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdlite.api import rank, world
from hvdlite.async_sgd.training.replica import Replica
from hvdlite.errors import ArgumentError
from hvdlite.launcher_link.whole_file import write_whole
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.watchdog.departures import LostRanks, Wish


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


def check_path(path: Path) -> None:
    """Raise ArgumentError unless a file can be written there."""
    if path.is_dir():
        raise ArgumentError(f"checkpoint={str(path)!r} is a folder: name a file in it.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ArgumentError(f"checkpoint={str(path)!r}: there is no folder {path.parent} in which this rank may write.")


class Failing:
    """What one rank of a training does when ranks fail.

    Args:
        goes_on, checkpoint: What `check_failures` has returned.
        replica: The parameters of this rank.
        ranks: The ranks of the training, as numbers in the job.
        losses: The ranks that the job has lost.
        lose: Lets the service of this rank go on without a worker, given by its number in the training; None if it has none.
        trains: Whether this rank trains.
        lock: Held while the replica gets new values.
    """

    def __init__(
        self,
        goes_on: bool,
        checkpoint: Path | None,
        replica: Replica[Any],
        ranks: Sequence[int],
        losses: LostRanks,
        lose: Callable[[int], None] | None,
        trains: bool,
        lock: threading.Lock,
    ) -> None:
        self._checkpoint, self._replica, self._lock = checkpoint, replica, lock
        self._ranks, self._losses, self._service = ranks, losses, lose
        saves = checkpoint is not None and trains
        self._wish = Wish(goes_on and trains, self._lose, self._save if saves else None)
        self._wants = goes_on or checkpoint is not None
        if self._wants:
            losses.add(self._wish)

    def end(self) -> None:
        """Note that the training is over."""
        if self._wants:
            self._losses.remove(self._wish)

    @property
    def living(self) -> list[int]:
        """The ranks that were not lost, as numbers in the training."""
        return [number for number, each in enumerate(self._ranks) if each not in self._losses.lost]

    def _lose(self, lost: int) -> None:
        if self._service is not None and lost in self._ranks:
            self._service(self._ranks.index(lost))

    def _save(self) -> str:
        path = self._checkpoint
        assert path is not None
        try:
            with self._lock:
                write_whole(path, self._replica.save, draft=f".{path.name}.{os.getpid()}")
        except Exception as error:
            return f"rank {rank()} could not save its parameters in {path}: {type(error).__name__}: {error}"
        return f"rank {rank()} has saved the parameters that it pulled last, in {path}."
