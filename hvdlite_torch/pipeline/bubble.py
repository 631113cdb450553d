"""How much of a step the stages wait for each other: the bubble of the pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import hvdlite
from hvdlite.api import world
from hvdlite.process_set import ProcessSet
from hvdlite.timeline import Row


class Bubble:
    """Measures the time in which this rank computes micro-batches, and the whole time of the steps.

    Attributes:
        busy: The seconds in which this rank has computed micro-batches.
        total: The seconds of all steps.
    """

    def __init__(self) -> None:
        self.busy = self.total = 0.0

    def watch(self, stage: Any) -> None:
        """Measure each forward and backward pass of a stage, and show it in the timeline."""
        stage.forward_one_chunk = self._timed(stage.forward_one_chunk, "FORWARD", stage.stage_index)
        stage.backward_one_chunk = self._timed(stage.backward_one_chunk, "BACKWARD", stage.stage_index)

    def _timed(self, call: Callable[..., Any], category: str, stage: int) -> Callable[..., Any]:
        def timed(chunk: int, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                with world().timeline.span(Row.PROGRAM, category, f"micro-batch {chunk}, stage {stage}"):
                    return call(chunk, *args, **kwargs)
            finally:
                self.busy += time.perf_counter() - begin

        return timed

    def share(self, process_set: ProcessSet) -> float:
        """Return the share of the steps' time in which the ranks wait: a mean over the ranks. All ranks call this."""
        seconds = np.array([self.busy, self.total])
        busy, total = hvdlite.allreduce(seconds, hvdlite.Sum, process_set=process_set)
        return float(1 - busy / total) if total else 0.0


def theoretical(stages: int, microbatches: int, per_rank: int) -> float:
    """Return the share of the bubble if all stages take equally long: (p - 1) / (v m + p - 1) for p ranks with v stages each.

    See Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", arXiv:2104.04473.
    """
    ranks = stages // per_rank
    return (ranks - 1) / (per_rank * microbatches + ranks - 1)
