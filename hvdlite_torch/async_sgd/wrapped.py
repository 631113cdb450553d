"""`AsyncDistributed`: the methods that an optimizer with a parameter server has besides those of torch."""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite_torch.async_sgd.training import AsyncTraining

T = TypeVar("T")


class AsyncDistributed:
    """The methods that `AsyncDistributedOptimizer` adds to an optimizer's class.

    It is a context manager too, whose end is `finish`::

        with hvd.AsyncDistributedOptimizer(optimizer, mode="async") as optimizer:
            for x, y in batches:
                ...
                optimizer.step()
    """

    _hvdlite_training: AsyncTraining

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

    def set_batch_weight(self, weight: float) -> None:
        """Set the number of samples in this rank's batch, for the next step only; 1 if it is not set.

        With mode="sync" gradients are averaged by these weights. In all modes a step of 0 samples pushes no gradient. The
        other modes apply each gradient as it is, so that other weights have no effect there.

        Args:
            weight: The number of samples, 0 or more.

        Raises:
            ArgumentError: The weight is negative.
        """
        self._hvdlite_training.weight.set(weight, hvdlite.Average)

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
                f"serve(): rank {hvdlite.rank()} trains, and serves in a thread meanwhile if it has to: call serve() only "
                "if optimizer.is_server."
            )
        self.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as torch's optimizer has it. All ranks that train call this; all get it.

        Raises:
            HvdliteError: See `synchronize`.
        """
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        state["state"] = self._hvdlite_training.state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the servers a state that `state_dict`, or torch's optimizer, has saved. All ranks that train call this.

        The servers also take over the parameters of the first rank, as they are now: load the model before.

        Raises:
            ArgumentError: The training is over.
            HvdliteError: See `synchronize`.
        """
        super().load_state_dict(state_dict)  # type: ignore[misc]
        state = {number: self.state[p] for number, p in self._numbered() if p in self.state}  # type: ignore[attr-defined]
        self.state.clear()  # type: ignore[attr-defined]
        self._hvdlite_training.load(state)

    def _numbered(self) -> list[tuple[int, Any]]:
        groups = self.param_groups  # type: ignore[attr-defined]
        return list(enumerate(p for group in groups for p in group["params"]))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ArgumentError: the parameters have been dealt out to the servers."""
        raise ArgumentError(
            "add_param_group: the servers have their parameters. Add all groups before you wrap the optimizer."
        )

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()

    def __reduce__(self) -> tuple[Any, ...]:
        raise ArgumentError("an optimizer with a parameter server cannot be copied or pickled. Use state_dict().")
