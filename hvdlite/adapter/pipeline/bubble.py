"""How much of a step the stages of a pipeline wait for each other: the bubble."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np

from hvdlite import api
from hvdlite.protocols import ReduceOp
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.timeline import Row


class Bubble:
    """Measures the time in which this rank computes micro-batches, and the whole time of the steps.

    Attributes:
        busy: The seconds in which this rank has computed micro-batches.
        total: The seconds of all steps.
    """

    def __init__(self) -> None:
        self.busy = self.total = 0.0

    @contextlib.contextmanager
    def computing(
        self, category: str, number: int, stage: int, part: str = "micro-batch", in_step: bool = True
    ) -> Iterator[None]:
        """Return a context manager that measures one pass of a micro-batch through a stage, and shows it in the timeline.

        Args:
            category: "FORWARD" or "BACKWARD".
            number: The number of the micro-batch.
            stage: The number of the stage.
            part: What the schedule calls a micro-batch.
            in_step: Whether it is part of a training step; the timeline shows others too.
        """
        begin = time.perf_counter()
        try:
            with api.world().timeline.span(Row.PROGRAM, category, f"{part} {number}, stage {stage}"):
                yield
        finally:
            self.busy += in_step * (time.perf_counter() - begin)

    def share(self, process_set: ProcessSet) -> float:
        """Return the share of the steps' time in which the ranks wait: a mean over the ranks. All ranks call this."""
        seconds = np.array([self.busy, self.total])
        busy, total = api.allreduce(seconds, ReduceOp.SUM, process_set=process_set)
        return float(1 - busy / total) if total else 0.0

    def report(
        self,
        process_set: ProcessSet,
        stages: int,
        microbatches: int,
        per_rank: int,
        schedule: str,
        parts: str = "micro-batches",
    ) -> str:
        """Return `share` next to the `theoretical` one, as a text. All ranks of the pipeline call this.

        Args:
            process_set: The ranks of the pipeline.
            stages, microbatches, per_rank: See `theoretical`.
            schedule: The name of the schedule.
            parts: What the schedule calls its micro-batches.
        """
        share = self.share(process_set)
        ideal = theoretical(stages, microbatches, per_rank)
        return (
            f"{stages} stages, {microbatches} {parts}, {schedule}: the ranks waited for {share:.0%} of the time "
            f"(theory: {ideal:.0%})"
        )


def theoretical(stages: int, microbatches: int, per_rank: int) -> float:
    """Return the share of the bubble if all stages take equally long: (p - 1) / (v m + p - 1) for p ranks with v stages each.

    See Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", arXiv:2104.04473.

    Args:
        stages: The number of all stages.
        microbatches: The number of micro-batches, m.
        per_rank: The number of stages of each rank, v.
    """
    ranks = stages // per_rank
    return (ranks - 1) / (per_rank * microbatches + ranks - 1)
