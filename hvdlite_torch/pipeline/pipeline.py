"""`Pipeline`: a model in stages on several ranks, a training step in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hvdlite.adapter.arguments import Everybody, rank_in, size_of
from hvdlite.adapter.pipeline.relay import Relay
from hvdlite.adapter.pipeline.schedules import Schedule, gpipe, one_forward_one_backward
from hvdlite.api import world
from hvdlite.checks import check_count
from hvdlite.errors import ArgumentError
from hvdlite.ranks.process_set import ProcessSet
from hvdlite_torch.checks.plain import is_plain_sequential
from hvdlite_torch.pipeline.batch import MicroBatches
from hvdlite_torch.pipeline.losses import Losses
from hvdlite_torch.pipeline.own_layers import OwnLayers
from hvdlite_torch.pipeline.passes import StagePasses
from hvdlite_torch.pipeline.stages import candidates, make_stages, settle_cuts
from hvdlite_torch.pipeline.steps import Steps
from hvdlite_torch.pipeline.tied import Tied
from hvdlite_torch.pipeline.values import TensorCodec
from hvdlite_torch.tensors.malloc import keep_freed_memory

_SCHEDULES: dict[str, Schedule] = {
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
    "interleaved": one_forward_one_backward,
}


class Pipeline(OwnLayers):
    """A model whose layers are on different ranks. Micro-batches go through the stages one after the other, and back.

    Every rank of the process set makes the same pipeline, from the same model with the same weights. It keeps the layers of its
    own stages; drop the model afterwards, so that the memory of the others is free. A step computes the loss of the whole batch
    and its gradients::

        pipeline = hvd.Pipeline(model, grid["pp"], loss=F.cross_entropy, microbatches=8, example=x[:4])
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(pipeline.parameters()), process_set=grid["dp"])
        for x, y in batches:
            loss = pipeline.step(x, y, optimizer)

    The schedules are GPipe (arXiv:1811.06965), 1F1B (PipeDream-Flush, arXiv:2006.09503) and interleaved 1F1B
    (arXiv:2104.04473).

    Args:
        model: An ``nn.Sequential``, which is cut between its children; or another model, which torch.export cuts before items
            of its ``nn.ModuleList`` or ``nn.Sequential``.
        process_set: The ranks of the pipeline. The ascending ranks have the stages in order.
        loss: ``loss(output, target)`` returns the loss of a micro-batch, a mean over its samples. The mean of a cross-entropy
            of classes may ignore targets, and weigh classes. For all other means, such as those over what is not padded, it
            returns a pair (sum, count): the loss of the batch is then the sum of all sums divided by that of all counts.
        microbatches: How many parts of a batch go through the stages one after the other; 1 means that the stages take turns.
        schedule: "1f1b", "gpipe", or "interleaved", where each rank has several stages.
        cuts: The names of the layers with which the stages but the first begin. None measures the layers with `example`, and
            balances time, then memory. Then all ranks of the job make pipelines of this model, and rank 0's times decide.
        example: The inputs of a micro-batch: a tensor, or a tuple for a model with several inputs. The values do not matter.
        example_keywords: The keyword arguments of the model that go with `example`, for a model that torch.export cuts.
        stages_per_rank: The stages of each rank, for "interleaved"; 2 by default.
        reduction: "sum" says that the loss of a batch is the sum of those of its micro-batches.

    Attributes:
        cuts: The names of the layers with which the stages but the first begin.
        stages: The numbers of this rank's stages.

    Raises:
        ArgumentError: An argument is wrong, or the model cannot be split. Raised on all ranks alike.

    Examples:
        >>> def trained():
        ...     model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
        ...     for weight in model.parameters():
        ...         torch.nn.init.ones_(weight)
        ...     pipeline = hvd.Pipeline(model, loss=torch.nn.functional.mse_loss, microbatches=2, cuts=["1"])
        ...     optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.25)
        ...     return [pipeline.step(torch.ones(4, 1), torch.zeros(4, 1), optimizer).item() for batch in range(2)]
        >>> on_ranks(2, trained)
        [[1.0, 0.0625], [1.0, 0.0625]]
    """

    def __init__(
        self,
        model: nn.Module,
        process_set: ProcessSet = Everybody,
        *,
        loss: Callable[[Any, Any], Any],
        microbatches: int = 4,
        schedule: str = "1f1b",
        cuts: Sequence[str] | None = None,
        example: Any = None,
        example_keywords: Mapping[str, Any] | None = None,
        stages_per_rank: int | None = None,
        reduction: str = "mean",
    ) -> None:
        if schedule not in _SCHEDULES:
            raise ArgumentError(f"schedule={schedule!r}: expected one of {', '.join(map(repr, _SCHEDULES))}.")
        check_count("microbatches", microbatches)
        if stages_per_rank is not None and schedule != "interleaved":
            raise ArgumentError(f'stages_per_rank={stages_per_rank} is for schedule="interleaved"; got {schedule!r}.')
        rank, size = rank_in(process_set), size_of(process_set)
        self._per_rank = (stages_per_rank or 2) if schedule == "interleaved" else 1
        self._count = size * self._per_rank
        example = None if example is None else _as_tuple(example)
        keywords = dict(example_keywords or {})
        # All ranks raise alike.
        self.cuts = settle_cuts(model, candidates(model), self._count, cuts, example, keywords)
        self.stages = list(range(rank, self._count, size))
        losses = Losses(loss, reduction, 0, "samples")
        keep_freed_memory(world("Pipeline()").config)
        made, shared, buffers = make_stages(model, self.cuts, self.stages, example, keywords)
        super().__init__([module for module, _ in made.values()], process_set, model, Tied(shared, process_set, rank))
        self._microbatches, self._schedule = microbatches, schedule
        self._in_sequence = is_plain_sequential(model)
        passes = {number: StagePasses(call, number, self._count, self._bubble) for number, (_, call) in made.items()}
        relay = Relay(process_set, rank, size, _SCHEDULES[schedule], self._per_rank, TensorCodec(_device_of(self)))
        self._steps = Steps(passes, relay, losses, rank == size - 1, process_set, self._bubble, self._tied, buffers)

    def step(self, x: Any, y: Any, optimizer: torch.optim.Optimizer | None = None, **keywords: Any) -> torch.Tensor:
        """Train on one batch. Every rank of the pipeline calls this with the same batch.

        Tensors of a batch are cut along dimension 0 into micro-batches of nearly equal size; those that are 1 long in it, or
        have no dimensions, are given whole to each micro-batch. Inputs that require gradients get them, on all ranks.

        Args:
            x: The input: a tensor, or a tuple of them for a model with several positional arguments.
            y: The target: a tensor, or nested tuples, lists and dicts of them, as the loss takes it.
            optimizer: The optimizer of this rank's parameters, plain or distributed: its gradients are set to zero before, and
                it makes a step. None leaves both to the program; gradients are added to those that are there.
            keywords: Keyword arguments of the model, such as an attention mask.

        Returns:
            The loss, the same on all ranks of the pipeline: shape ``()``.

        Raises:
            ArgumentError: The tensors have different numbers of samples, or the loss is no mean over them and does not say so.
            Exception: What a stage, the loss, or a hook has raised; other ranks raise HvdliteError. Parameters and gradients
                are as they were, and the next step begins anew.
            HvdliteError: A rank has left in the middle of the step.
        """

        def batch() -> MicroBatches:
            self._check_optimizer(optimizer)
            return self._batch(x, keywords, y, True)

        return self._steps.train(batch, optimizer, self.parameters())

    def predict(self, x: Any, **keywords: Any) -> Any:
        """Return the output for a batch, on all ranks of the pipeline, without gradients. Every rank calls this.

        The layers are used in the mode in which they are; call `eval` before.

        Raises:
            Exception: See `step`.
        """
        return self._steps.predict(lambda: self._batch(x, keywords, None, False))

    def _batch(self, x: Any, keywords: Mapping[str, Any], target: Any, trains: bool) -> MicroBatches:
        """Return a batch in micro-batches.

        Raises:
            ArgumentError: It cannot be cut, or the model takes no keyword arguments.
        """
        if self._in_sequence and keywords:
            raise ArgumentError(
                f"{', '.join(keywords)}: an nn.Sequential takes no keyword arguments. Give `x` as a tuple, for a first layer "
                "that takes several."
            )
        return MicroBatches(_as_tuple(x), keywords, target, self._microbatches, trains=trains)

    def report(self) -> str:
        """Return the share of the bubble in the steps so far, and the theoretical one. All ranks of the pipeline call this."""
        return self._bubble.report(self.process_set, self._count, self._microbatches, self._per_rank, self._schedule)


def _as_tuple(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def _device_of(layers: OwnLayers) -> torch.device:
    return next(layers.parameters()).device
