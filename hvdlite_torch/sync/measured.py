"""Measures the steps of a program for ``hvdlite advise``, which sets the setting `advise`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hvdlite.errors import ArgumentError
from hvdlite.gradients.aggregator import name_of
from hvdlite.tools.advise.profile import WHOLE
from hvdlite.tools.advise.recorder import MeasuringRequest, Recorder
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.step.gradient_sync import GradientSync
from hvdlite_torch.sync.device import DeviceSync
from hvdlite_torch.tensors.gradient import gradient_info


def measure(sync: GradientSync, context: OptimizerContext) -> None:
    """Measure what `sync` does from now on, and end the program when enough steps were measured.

    Args:
        sync: Combines the gradients.
        context: The optimizer.

    Raises:
        ArgumentError: The gradients are on a GPU, or the program has another distributed optimizer already.
    """
    if isinstance(sync, DeviceSync):
        raise ArgumentError("hvdlite advise measures training in host memory; the parameters are on a GPU.")
    if context.group.exchanges:
        raise ArgumentError(
            "hvdlite advise measures the steps of one DistributedOptimizer, and this program makes another one. Measure a "
            "program with one of them."
        )
    recorder = Recorder(
        context.group,
        MeasuringRequest.unpack(context.config.advise),
        [gradient_info(parameter) for parameter in context.trained()],
        _in_words(context),
        not context.options.shard,
    )
    for index, parameter in enumerate(context.given()):
        parameter.register_post_accumulate_grad_hook(partial(_tell, recorder, index))
    begins, ends = recorder.exchange_begins, recorder.exchange_ends
    sync.combine = _around(sync.combine, [begins], [ends])  # type: ignore[method-assign]
    sync.before_step = _around(sync.before_step, [], [recorder.update_begins])  # type: ignore[method-assign]
    sync.after_step = _around(  # type: ignore[method-assign]
        sync.after_step, [recorder.update_ends, begins], [ends, recorder.step_ends]
    )


def _around(
    call: Callable[[], None], before: list[Callable[[], object]], after: list[Callable[[], object]]
) -> Callable[[], None]:
    def traced() -> None:
        for note in before:
            note()
        call()
        for note in after:
            note()

    return traced


def _tell(recorder: Recorder, index: int, _: torch.Tensor) -> None:
    recorder.ready(index)


def _in_words(context: OptimizerContext) -> str:
    """Return how the program combines gradients."""
    options = context.options
    if options.local_steps is not None:
        return f"{type(options.local_steps).__name__}({options.local_steps.every})"
    if options.aggregator is not None:
        return name_of(options.aggregator)
    if options.shard:
        return "shard=True"
    return WHOLE if options.codec is None else options.codec.name
