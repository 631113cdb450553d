"""`Failing`: what one rank of a training does when ranks fail: it goes on without a worker, or saves before the job ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.api import rank
from hvdlite.async_sgd.training.checkpoint import write_whole
from hvdlite.async_sgd.training.options import Options
from hvdlite.async_sgd.training.replica import Replica
from hvdlite.watchdog.departures import Losses, Wish


class Failing:
    """What one rank of a training does when ranks fail.

    Args:
        options: The arguments of the training.
        replica: The parameters of this rank.
        ranks: The ranks of the training, as numbers in the job.
        losses: The ranks that the job has lost.
        lose: Lets the service of this rank go on without a worker, given by its number in the training; None if it has none.
        trains: Whether this rank trains.
        lock: Held while the replica gets new values.
    """

    def __init__(
        self,
        options: Options,
        replica: Replica[Any],
        ranks: Sequence[int],
        losses: Losses,
        lose: Callable[[int], None] | None,
        trains: bool,
        lock: threading.Lock,
    ) -> None:
        self._options, self._replica, self._ranks, self._losses, self._service = options, replica, ranks, losses, lose
        self._lock = lock
        saves = options.checkpoint is not None and trains
        self._wish = Wish(options.goes_on and trains, self._lose, self._save if saves else None)
        self._wants = options.goes_on or options.checkpoint is not None
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
        path = self._options.checkpoint
        assert path is not None
        try:
            with self._lock:
                write_whole(path, self._replica.save)
        except Exception as error:
            return f"rank {rank()} could not save its parameters in {path}: {type(error).__name__}: {error}"
        return f"rank {rank()} has saved the parameters that it pulled last, in {path}."
