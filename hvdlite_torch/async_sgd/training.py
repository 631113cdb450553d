"""`TorchTraining`: one rank's part in a training with a parameter server, for torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hvdlite.async_sgd.training.options import AsyncOptions
from hvdlite.async_sgd.training.training import AsyncTraining
from hvdlite_torch.async_sgd.layers import LayerHooks
from hvdlite_torch.async_sgd.replica import TorchReplica
from hvdlite_torch.step.lease import weakly
from hvdlite_torch.step.pending import BatchWeight


class TorchTraining(AsyncTraining[torch.Tensor]):
    """What one rank does in the training of one optimizer of torch.

    Args:
        optimizer: The program's optimizer. Its state goes to the servers.
        names: Names of some or all parameters, by ``id(parameter)``.
        options: The arguments.
        model: The model, for `overlap_pull`.

    Attributes:
        weight: The number of samples in the next step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        options: AsyncOptions,
        model: torch.nn.Module | None = None,
    ) -> None:
        self._torch = TorchReplica(optimizer, names)
        super().__init__(self._torch, options)
        optimizer.state.clear()
        self.weight = BatchWeight()
        self._layers: LayerHooks | None = None
        sends_early = self.overlaps and not self.is_server
        if model is not None and options.overlap_pull and not self.is_server:
            numbers = {id(p): number for number, p in enumerate(self._torch.trained)}
            self._layers = LayerHooks(model, numbers, self._torch.names, self.values)
        self._hooks = self._torch.watch(weakly(self, "ready")) if sends_early else []

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Add the gradients to the next push; push and pull if it is time to.

        Args:
            closure: Evaluates the loss and its gradients once; None if the gradients are there.

        Returns:
            What the closure has returned, or None.

        Raises:
            ArgumentError: This rank only serves, or the training is over, or a gradient has NaN or infinite elements.
            UnsupportedTensorError: The optimizer does not take such a gradient.
            HvdliteError: A server has failed, or a rank has left the job.
        """
        self.check_trains("step()")
        result = evaluate(closure)
        weight = self.weight.take(False)
        if self.add(self._torch.gradients() if weight > 0 else {}, weight):
            if self._layers is None:
                self.values.take_latest()
            else:
                self._layers.end_step()
        return result

    def finish(self) -> None:
        """See `AsyncTraining`."""
        super().finish()
        for hook in self._hooks:
            hook.remove()
        if self._layers is not None:
            self._layers.remove()

    def numbered_state(self) -> dict[int, Any]:
        """Return the optimizer's state by the parameters' numbers in the optimizer. All ranks call this."""
        return {self._torch.numbers[n]: state for part in self.state() for n, state in part.items()}

    def load_numbered(self, state: Mapping[int, Any]) -> None:
        """Give the servers this state, and the parameters, of the first rank. All ranks call this.

        Args:
            state: The state of parameters by their numbers in the optimizer.
        """
        self.load({n: state[number] for n, number in enumerate(self._torch.numbers) if number in state})


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Evaluate the loss and its gradients by the program's closure, and return what it returns; None if there is no closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
