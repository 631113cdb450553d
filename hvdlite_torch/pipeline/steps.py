"""`Steps`: a training step of a model whose stages are on different ranks, and a prediction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

import hvdlite
from hvdlite.adapter.pipeline.bubble import Bubble
from hvdlite.adapter.pipeline.relay import Relay
from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.ranks.process_set import ProcessSet
from hvdlite_torch.pipeline.batch import MicroBatches
from hvdlite_torch.pipeline.hooks import Hooks
from hvdlite_torch.pipeline.losses import Losses
from hvdlite_torch.pipeline.passes import StagePasses, without_autocast
from hvdlite_torch.pipeline.tied import SharedBuffers, Tied
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
        buffers: The buffers that several stages have.
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
        buffers: SharedBuffers,
    ) -> None:
        self._stages, self._relay, self._losses, self._is_last = stages, relay, losses, is_last
        self._process_set, self._bubble, self._tied, self._buffers = process_set, bubble, tied, buffers

    def train(
        self,
        make_batch: Callable[[], MicroBatches],
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
        own = list(parameters)
        hooks, before = Hooks(own), [parameter.grad for parameter in own]
        for parameter in own:
            parameter.grad = None
        try:
            with hooks.held_back():
                found = self._passes_of(batch, error, own, hooks.are_of_program)
                correction, count, is_counted, loss, wanting, hooked = found
                self._tied.add_up()
            for parameter in own:
                if parameter.grad is not None and correction != 1:
                    parameter.grad.mul_(correction)
            self._call(hooks.change_gradients, hooked)
        except BaseException:
            for parameter, gradient in zip(own, before, strict=True):
                parameter.grad = gradient
            raise
        driver = getattr(optimizer, "_hvdlite_driver", None)
        if is_counted and isinstance(driver, StepDriver):
            driver.set_weight(count, unless_set=True)
        trained = [parameter for parameter in own if parameter.grad is not None]
        for parameter, gradient in zip(own, before, strict=True):
            _add_gradient(parameter, gradient)
        self._call(partial(hooks.tell, trained), hooked, "Gradients are added, and hooks of other ranks have run.")
        if wanting:
            self._input_gradients(batch, correction, int(wanting))
        if optimizer is not None:
            with without_autocast(), self._relay.alone("the optimizer's step"):
                optimizer.step()
        return torch.tensor(loss, dtype=torch.float64)

    def _call(self, hooks: Callable[[], None], hooked: float, *left: str) -> None:
        """Call hooks on all ranks. If they raise on one, all ranks raise.

        Args:
            hooks: Calls those of this rank.
            hooked: How many ranks have hooks of the program. Without one no rank asks the others.
            left: See `Relay.settle`.
        """
        error = None
        try:
            hooks()
        except Exception as failure:
            if not hooked:
                raise
            error = failure
        if hooked:
            self._relay.settle(error, [], *left)

    def _passes_of(
        self, batch: MicroBatches | None, error: Exception | None, own: Sequence[nn.Parameter], hooked: bool
    ) -> Any:
        """Make the passes of a training step, and return what the ranks have to tell each other about it."""
        begin = time.perf_counter()
        losses = self._losses
        if batch is not None:
            losses.begin(batch.parts, batch.rows, [*own, *batch.leaves])
        error = self._run(batch, losses, error)
        self._bubble.total += time.perf_counter() - begin
        of_loss = [0.0, 0.0, 0.0, 0.0]
        if self._is_last and error is None:
            weighing = losses.weighing
            of_loss = [weighing.correction, weighing.count, float(losses.is_counted), weighing.loss]
        return self._relay.settle(error, [*of_loss, batch is not None and batch.wants_gradients, hooked])

    def _run(
        self,
        batch: MicroBatches | None,
        losses: Losses | None,
        error: Exception | None,
        outputs: list[Any] | None = None,
    ) -> Exception | None:
        """Let the micro-batches go through the stages; return what has failed.

        Args:
            batch: The batch; None if there is an error.
            losses: The losses of a training step.
            error: What has failed before.
            outputs: Gets the outputs of a prediction.
        """
        torch.clear_autocast_cache()  # casts of weights as they were before a step, or without a graph
        try:
            with self._buffers.unchanged():
                for stage in self._stages.values():
                    stage.begin(batch, losses)
                error = self._relay.run(self._stages, batch.parts if batch else 1, losses is not None, error)
                if outputs is not None:
                    outputs += self._stages[max(self._stages)].outputs
        except ArgumentError as failure:
            error = error or failure
        finally:
            for stage in self._stages.values():
                stage.begin(None, None)
        return error

    def _input_gradients(self, batch: MicroBatches | None, correction: float, wanting: int) -> None:
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

    def predict(self, make_batch: Callable[[], MicroBatches], dimension: int = 0) -> Any:
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
        outputs: list[Any] = []
        error = self._run(batch, None, error, outputs)
        if self._is_last and error is None:
            try:
                whole = _joined(outputs, dimension)
            except Exception as failure:
                error = failure
        self._relay.settle(error, [0.0] * 6)
        return hvdlite.broadcast_object(whole, self._process_set.size() - 1, process_set=self._process_set)


def _add_gradient(parameter: nn.Parameter, before: torch.Tensor | None) -> None:
    """Add the gradient of this step to what was there before."""
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
