"""`Pipeline`: a model in stages on several ranks, a training step in one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import hvdlite
from hvdlite.adapter.arguments import Everybody, rank_in, size_of
from hvdlite.checks import check_count
from hvdlite.errors import ArgumentError
from hvdlite.process_set import ProcessSet
from hvdlite_torch.distributed import backend
from hvdlite_torch.pipeline.bubble import watch
from hvdlite_torch.pipeline.own_layers import OwnLayers
from hvdlite_torch.pipeline.stages import candidates, make_stages, settle_cuts

Loss = Callable[[Any, Any], torch.Tensor]
_SCHEDULES = ("1f1b", "gpipe", "interleaved")


class Pipeline(OwnLayers):
    """A model whose layers are on different ranks. Micro-batches go through the stages one after the other, and back.

    Every rank of the process set makes the same pipeline, from the same model with the same weights. It keeps the layers of its
    own stages; drop the model afterwards, so that the memory of the others is free. A step computes the gradients of the mean
    of the micro-batches' losses, which is the loss of the whole batch if `loss` is a mean over the samples::

        pipeline = hvd.Pipeline(model, grid["pp"], loss=F.cross_entropy, microbatches=8, example=x[:4])
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(pipeline.parameters()), process_set=grid["dp"])
        for x, y in batches:
            loss = pipeline.step(x, y, optimizer)

    The schedules are GPipe (arXiv:1811.06965), 1F1B (PipeDream-Flush, arXiv:2006.09503) and interleaved 1F1B
    (arXiv:2104.04473), of ``torch.distributed.pipelining``.

    Args:
        model: An ``nn.Sequential``, which is cut between its children; or another model, which torch.export cuts before items
            of its ``nn.ModuleList`` or ``nn.Sequential``.
        process_set: The ranks of the pipeline. The ascending ranks have the stages in order.
        loss: ``loss(output, target)`` returns the mean loss of a micro-batch.
        microbatches: How many equal parts of a batch go through the stages one after the other; 1 means that the stages take
            turns.
        schedule: "1f1b", "gpipe", or "interleaved", where each rank has several stages.
        cuts: The names of the layers with which the stages but the first begin. None measures the layers with `example`, and
            balances time, then memory. Then all ranks of the job make pipelines of this model, and rank 0's times decide.
        example: The inputs of a micro-batch: a tensor, or a tuple for a model with several inputs. The values do not matter.
        stages_per_rank: The stages of each rank, for "interleaved"; 2 by default.

    Attributes:
        cuts: The names of the layers with which the stages but the first begin.
        stages: The numbers of this rank's stages.

    Raises:
        ArgumentError: An argument is wrong, or the model cannot be split. Raised on all ranks alike.

    Examples:
        >>> def trained():  # of one stage, because torch.distributed is one for a process, and ranks are threads here
        ...     model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
        ...     for weight in model.parameters():
        ...         torch.nn.init.ones_(weight)
        ...     pipeline = hvd.Pipeline(model, loss=torch.nn.functional.mse_loss, microbatches=2, cuts=[])
        ...     optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.25)
        ...     losses = [pipeline.step(torch.ones(4, 1), torch.zeros(4, 1), optimizer).item() for batch in range(2)]
        ...     torch.distributed.destroy_process_group()
        ...     return losses
        >>> on_ranks(1, trained)
        [[1.0, 0.0625]]
    """

    def __init__(
        self,
        model: nn.Module,
        process_set: ProcessSet = Everybody,
        *,
        loss: Loss,
        microbatches: int = 4,
        schedule: str = "1f1b",
        cuts: Sequence[str] | None = None,
        example: Any = None,
        stages_per_rank: int | None = None,
    ) -> None:
        if schedule not in _SCHEDULES:
            raise ArgumentError(f"schedule={schedule!r}: expected one of {', '.join(map(repr, _SCHEDULES))}.")
        check_count("microbatches", microbatches)
        if stages_per_rank is not None and schedule != "interleaved":
            raise ArgumentError(f'stages_per_rank={stages_per_rank} is for schedule="interleaved"; got {schedule!r}.')
        rank, size = rank_in(process_set), size_of(process_set)
        self._per_rank = (stages_per_rank or 2) if schedule == "interleaved" else 1
        count = size * self._per_rank
        example = None if example is None else _as_tuple(example)
        self.cuts = settle_cuts(model, candidates(model), count, cuts, example)  # all ranks raise alike
        self.stages = list(range(rank, count, size))
        self._loss, self._microbatches, self._schedule = loss, microbatches, schedule
        made = make_stages(model, self.cuts, self.stages, example, backend.group_of(process_set))
        super().__init__([module for module, _ in made.values()], process_set, model)
        self._make = {number: make for number, (_, make) in made.items()}
        self._is_first, self._is_last = 0 in self.stages, count - 1 in self.stages
        self._count, self._last_place = count, size - 1
        self._runs: dict[tuple[Any, ...], Any] = {}

    def step(self, x: Any, y: Any, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
        """Train on one batch. Every rank of the pipeline calls this with the same batch.

        Args:
            x: The input: a tensor, or a tuple of them, with a dimension 0 that `microbatches` divides.
            y: The target, likewise.
            optimizer: The optimizer of this rank's parameters, plain or distributed: its gradients are set to zero before, and
                it makes a step. None leaves both to the program; gradients are added to those that are there.

        Returns:
            The loss, the same on all ranks of the pipeline: shape ``()``.

        Raises:
            ArgumentError: The batch cannot be cut into equal micro-batches.
            HvdliteError: A rank has left in the middle of the step.
        """
        self._check_optimizer(optimizer)
        inputs = _as_tuple(x)
        run = self._run_for(inputs, self._loss)
        if optimizer is not None:
            optimizer.zero_grad()
        begin = time.perf_counter()
        losses: list[torch.Tensor] = []
        run.step(
            *(inputs if self._is_first else ()),
            **({"target": y, "losses": losses} if self._is_last else {}),
            return_outputs=False,
        )
        self._bubble.total += time.perf_counter() - begin
        mean = torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros(())
        # All ranks give the same dtype, though only the last one knows that of the loss.
        mean = hvdlite.broadcast(mean.double(), self._last_place, process_set=self.process_set)
        if optimizer is not None:
            optimizer.step()
        return mean

    def predict(self, x: Any) -> Any:
        """Return the output for a batch, on all ranks of the pipeline, without gradients. Every rank calls this.

        The layers are used in the mode in which they are; call `eval` before.

        Raises:
            ArgumentError: The batch cannot be cut into equal micro-batches.
        """
        inputs = _as_tuple(x)
        run = self._run_for(inputs, None)
        with torch.no_grad():
            output = run.eval(*(inputs if self._is_first else ()))
        return hvdlite.broadcast_object(
            output if self._is_last else None, self._last_place, process_set=self.process_set
        )

    def _run_for(self, inputs: Sequence[torch.Tensor], loss: Loss | None) -> Any:
        """Return the schedule for inputs of these shapes; without a loss, one that only goes forward.

        A stage of torch knows the shapes of its messages, and whether it goes back, so each schedule has stages of its own.
        """
        rows = inputs[0].shape[0] if inputs[0].dim() else 0
        if rows == 0 or rows % self._microbatches:
            fits = rows - rows % self._microbatches
            raise ArgumentError(
                f"a batch of {rows} samples cannot be cut into {self._microbatches} equal micro-batches. Drop the last samples "
                f"({fits} would do; drop_last=True in a DataLoader), or choose `microbatches` that divides {rows}."
            )
        goes_back = loss is not None
        key = (goes_back, *((tensor.dtype, tuple(tensor.shape)) for tensor in inputs))
        if key not in self._runs:
            stages = [self._make[number]() for number in self.stages]
            if goes_back:
                for stage in stages:
                    watch(self._bubble, stage)
            self._runs[key] = self._new_run(stages, loss)
        return self._runs[key]

    def _new_run(self, stages: list[Any], loss: Loss | None) -> Any:
        if self._schedule == "interleaved":
            return ScheduleInterleaved1F1B(stages, self._microbatches, loss_fn=loss)
        # With fewer micro-batches than stages, 1F1B is GPipe: no rank begins a backward pass before its last forward pass.
        is_1f1b = loss is not None and self._schedule == "1f1b" and self._microbatches >= self._count
        return (Schedule1F1B if is_1f1b else ScheduleGPipe)(stages[0], self._microbatches, loss_fn=loss)

    def report(self) -> str:
        """Return the share of the bubble in the steps so far, and the theoretical one. All ranks of the pipeline call this."""
        return self._bubble.report(self.process_set, self._count, self._microbatches, self._per_rank, self._schedule)


def _as_tuple(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)
