"""`AsyncDistributed`: the methods that an optimizer with a parameter server has besides those of torch."""

from __future__ import annotations

from typing import Any

import hvdlite
from hvdlite.async_sgd.training.methods import AsyncMethods
from hvdlite.errors import ArgumentError
from hvdlite_torch.async_sgd.hogwild import HogwildTraining
from hvdlite_torch.async_sgd.training import TorchTraining


class AsyncDistributed(AsyncMethods):
    """The methods that `AsyncDistributedOptimizer` adds to an optimizer's class.

    It is a context manager too, whose end is `finish`::

        with hvd.AsyncDistributedOptimizer(optimizer, mode="async") as optimizer:
            for x, y in batches:
                ...
                optimizer.step()

    Examples:
        >>> def trained():
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     with hvd.AsyncDistributedOptimizer(torch.optim.SGD([weight], lr=1.0), mode="sync") as optimizer:
        ...         (weight * hvd.rank()).sum().backward()
        ...         optimizer.step()
        ...     return weight.item()
        >>> on_ranks(2, trained)
        [-0.5, -0.5]
    """

    _hvdlite_training: TorchTraining | HogwildTraining

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

    def wait(self) -> None:
        """Wait until this rank has the new values of all parameters, which are there already but with ``overlap_pull=True``.

        A program calls this before it reads parameters otherwise than by the forward pass of their modules.

        Raises:
            HvdliteError: A server has failed, or a rank has left the job.
        """
        self._hvdlite_training.values.take_all()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as torch's optimizer has it. All ranks that train call this; all get it.

        Raises:
            HvdliteError: See `synchronize`.
        """
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        state["state"] = self._hvdlite_training.numbered_state()
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
        self._hvdlite_training.load_numbered(state)

    def _numbered(self) -> list[tuple[int, Any]]:
        groups = self.param_groups  # type: ignore[attr-defined]
        return list(enumerate(p for group in groups for p in group["params"]))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ArgumentError: the parameters have been dealt out to the servers."""
        raise ArgumentError(
            "add_param_group: the servers have their parameters. Add all groups before you wrap the optimizer."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        raise ArgumentError("an optimizer with a parameter server cannot be copied or pickled. Use state_dict().")
