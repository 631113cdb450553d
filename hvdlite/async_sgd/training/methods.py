"""`AsyncMethods`: the methods that an optimizer with a parameter server has in every framework."""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar

from hvdlite.api import rank
from hvdlite.async_sgd.training.training import AsyncTraining
from hvdlite.errors import ArgumentError

T = TypeVar("T")


class AsyncMethods:
    """The methods that `AsyncDistributedOptimizer` adds to an optimizer's class in every framework.

    It is a context manager too, whose end is `finish`.
    """

    _hvdlite_training: AsyncTraining[Any]

    @property
    def is_server(self) -> bool:
        """Whether this rank only serves. It then calls `serve` instead of the training loop."""
        return self._hvdlite_training.is_server

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that train, as numbers in the process set, ascending."""
        return self._hvdlite_training.options.workers

    @property
    def pushes(self) -> int:
        """The number of pushes of this rank."""
        return self._hvdlite_training.worker.pushes

    @property
    def mean_delay(self) -> float:
        """How many pushes of other ranks a server has applied between a pull of this rank and its next push, on average."""
        worker = self._hvdlite_training.worker
        return worker.missed / max(1, worker.pushes)

    def synchronize(self) -> None:
        """Wait for all ranks, which call this too; then all have the same parameters, with all pushes applied.

        A program calls this before it compares ranks, or before it tests its model on several ranks.

        Raises:
            ArgumentError: The training is over.
            HvdliteError: A server has failed, or a rank has left the job, or the ranks have called different things.
        """
        self._hvdlite_training.synchronize()

    def finish(self) -> None:
        """Wait until all ranks have called this; then all have the final parameters, bit for bit the same.

        Gradients that were not pushed (``push_every``) are pushed first. The other ranks go on meanwhile, and do not wait for
        this rank any more. The end of the program, and `shutdown`, call this too. A second call does nothing.

        Raises:
            HvdliteError: A server has failed, or a rank has left the job, or the ranks have called different things.
        """
        self._hvdlite_training.finish()

    def serve(self) -> None:
        """Serve until all workers have called `finish`. A rank for which `is_server` is True calls this.

        Raises:
            ArgumentError: This rank trains.
            HvdliteError: See `finish`.
        """
        if not self.is_server:
            raise ArgumentError(
                f"serve(): rank {rank()} trains, and serves in a thread meanwhile if it has to: call serve() only "
                "if optimizer.is_server."
            )
        self.finish()

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
