"""`Steps`: a training step of a model whose stages are on different ranks, and a prediction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

import hvdlite
from hvdlite.adapter.pipeline.bubble import Bubble
from hvdlite.adapter.pipeline.relay import Relay
from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.ranks.process_set import ProcessSet
from hvdlite_torch.pipeline.batch import Batch
from hvdlite_torch.pipeline.losses import Losses
from hvdlite_torch.pipeline.passes import StagePasses
from hvdlite_torch.pipeline.tied import Tied
from hvdlite_torch.step.driver import StepDriver


class Steps:
    """What all ranks of a pipeline do together: the passes of a batch, its loss, and the optimizer's step.

    Args:
        stages: The passes of this rank's stages, by number.
        relay: Makes passes.
        losses: The losses, which the rank of the last stage uses.
        is_last: Whether this rank has the last stage.
        process_set: The ranks of the pipeline.
        bubble: Measures steps.
        tied: The parameters that several ranks have.
    """

    def __init__(
        self,
        stages: Mapping[int, StagePasses],
        relay: Relay,
        losses: Losses,
        is_last: bool,
        process_set: ProcessSet,
        bubble: Bubble,
        tied: Tied,
    ) -> None:
        self._stages, self._relay, self._losses, self._is_last = stages, relay, losses, is_last
        self._process_set, self._bubble, self._tied = process_set, bubble, tied

    def train(
        self,
        make_batch: Callable[[], Batch],
        optimizer: torch.optim.Optimizer | None,
        parameters: Iterable[nn.Parameter],
    ) -> torch.Tensor:
        """Train on a batch, and return its loss. All ranks of the pipeline call this.

        Args:
            make_batch: Returns the batch; called once. If it raises, all ranks raise.
            optimizer: See `Pipeline.step`.
            parameters: Those of this rank's stages.
        """
        batch, error = None, None
        try:
            self._tied.check()
            batch = make_batch()
        except Exception as failure:
            error = failure
        if optimizer is not None and error is None:
            optimizer.zero_grad()
        before = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, _ in before:
            parameter.grad = None
        try:
            correction, count, is_counted, loss, wanting = self._passes_of(batch, error)
            self._tied.add_up()
        except BaseException:
            for parameter, gradient in before:
                parameter.grad = gradient
            raise
        for parameter, gradient in before:
            _settle_gradient(parameter, gradient, correction)
        if wanting:
            self._input_gradients(batch, correction, int(wanting))
        if optimizer is not None:
            driver = getattr(optimizer, "_hvdlite_driver", None)
            if is_counted and isinstance(driver, StepDriver):
                driver.set_weight(count, unless_set=True)
            optimizer.step()
        return torch.tensor(loss, dtype=torch.float64)

    def _passes_of(self, batch: Batch | None, error: Exception | None) -> Any:
        """Make the passes of a training step, and return what the ranks have to tell each other about it."""
        begin = time.perf_counter()
        losses = self._losses
        if batch is not None:
            losses.begin(batch.parts, batch.rows)
        try:
            for stage in self._stages.values():
                stage.begin(batch, losses)
            error = self._relay.run(self._stages, batch.parts if batch else 1, True, error)
        finally:
            for stage in self._stages.values():
                stage.begin(None, None)
        self._bubble.total += time.perf_counter() - begin
        of_loss = [0.0, 0.0, 0.0, 0.0]
        if self._is_last and error is None:
            weighing = losses.weighing
            of_loss = [weighing.correction, weighing.count, float(losses.is_counted), weighing.loss]
        return self._relay.settle(error, [*of_loss, batch is not None and batch.wants_gradients])

    def _input_gradients(self, batch: Batch | None, correction: float, wanting: int) -> None:
        """Give all ranks the gradients of inputs and targets, of which each rank has those that its own stages have used."""
        size = self._process_set.size()
        if wanting != size or batch is None:
            raise MismatchError(
                f"an input or target of this step requires a gradient on {wanting} of {size} ranks: give it on all ranks alike."
            )
        found = batch.gradients(correction)
        if size > 1:
            found = hvdlite.allreduce(found, hvdlite.Sum, process_set=self._process_set)
        batch.give(found)

    def predict(self, make_batch: Callable[[], Batch], dimension: int = 0) -> Any:
        """Return the output for a batch, on all ranks of the pipeline. All of them call this.

        Args:
            make_batch: See `train`.
            dimension: The dimension along which the parts of outputs are joined.
        """
        batch, error, whole = None, None, None
        try:
            batch = make_batch()
        except Exception as failure:
            error = failure
        last = max(self._stages)
        try:
            for stage in self._stages.values():
                stage.begin(batch, None)
            error = self._relay.run(self._stages, batch.parts if batch else 1, False, error)
            if self._is_last and error is None:
                try:
                    whole = _joined(self._stages[last].outputs, dimension)
                except Exception as failure:
                    error = failure
        finally:
            for stage in self._stages.values():
                stage.begin(None, None)
        self._relay.settle(error, [0.0] * 5)
        return hvdlite.broadcast_object(whole, self._process_set.size() - 1, process_set=self._process_set)


def _settle_gradient(parameter: nn.Parameter, before: torch.Tensor | None, correction: float) -> None:
    """Correct the gradient of this step, and add it to what was there before."""
    if parameter.grad is not None and correction != 1:
        parameter.grad.mul_(correction)
    if before is None:
        return
    if parameter.grad is not None:
        with torch.no_grad():
            if before.layout is torch.strided or before.layout is parameter.grad.layout:
                before.add_(parameter.grad)
            else:
                before = before + parameter.grad
    parameter.grad = before


def _joined(outputs: list[Any], dimension: int) -> Any:
    """Return the outputs of all parts as one."""

    def join(*parts: Any) -> Any:
        if not isinstance(parts[0], torch.Tensor):
            return parts[0]
        if parts[0].dim() <= dimension:
            raise ArgumentError(
                f"the model returned a tensor of the shape {tuple(parts[0].shape)} for each of {len(parts)} micro-batches, "
                "which cannot be joined: expected one row for each sample."
            )
        return torch.cat(parts, dimension)

    return tree_map(join, outputs[0], *outputs[1:])
