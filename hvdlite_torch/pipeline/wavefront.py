"""`Wavefront`: recurrent layers on several ranks, which take a sequence in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from hvdlite.adapter.arguments import Everybody, rank_in, size_of
from hvdlite.adapter.pipeline.relay import Relay
from hvdlite.adapter.pipeline.schedules import there_and_back
from hvdlite.api import world
from hvdlite.checks import check_count
from hvdlite.errors import ArgumentError
from hvdlite.ranks.process_set import ProcessSet
from hvdlite_torch.pipeline.batch import MicroBatches
from hvdlite_torch.pipeline.losses import Losses
from hvdlite_torch.pipeline.own_layers import OwnLayers
from hvdlite_torch.pipeline.passes import StagePasses
from hvdlite_torch.pipeline.recurrent import Alone, Chunks, State, layers_of, time_dimension, units
from hvdlite_torch.pipeline.stages import check_stages, refuse_hooks, settle_cuts
from hvdlite_torch.pipeline.steps import Steps
from hvdlite_torch.pipeline.tied import SharedBuffers, Tied, shared_parameters
from hvdlite_torch.pipeline.values import TensorCodec
from hvdlite_torch.tensors.malloc import keep_freed_memory


class Wavefront(OwnLayers):
    """A stack of recurrent layers on several ranks. While a rank computes a chunk of the sequence, the next has the one before.

    In a recurrent layer a time step needs the one before, and the same time step of the layer below. So layer l can compute
    time step t while layer l + 1 computes time step t - 1: the computation goes through layers and time steps like a wave.
    Here the waves are chunks of time steps, and the layers are in stages, one for each rank. Backward they go the other way.
    The gradients are those of the whole sequence; nothing is truncated. (The wavefront of layers and time steps: Appleyard et
    al., "Optimizing Performance of Recurrent Neural Networks on GPUs", arXiv:1604.01946.)

    Every rank of the process set makes the same wavefront, from the same model with the same weights. It keeps the layers of
    its own stage; drop the model afterwards, so that the memory of the others is free::

        model = nn.Sequential(nn.Embedding(256, 64), nn.LSTM(64, 128, num_layers=4, batch_first=True), nn.Linear(128, 256))
        wavefront = hvd.Wavefront(model, grid["pp"], loss=loss, chunks=8, example=x)
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(wavefront.parameters()), process_set=grid["dp"])
        for x, y in batches:                        # (samples, time steps)
            loss = wavefront.step(x, y, optimizer)

    Args:
        model: An ``nn.Sequential`` of ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``, whose layers may be in different stages, and of
            layers that compute each time step alone: ``nn.Embedding``, ``nn.Linear``, dropout, activations. Each layer passes
            on its output to the next. The recurrent layers begin each batch with a state of zeros.
        process_set: The ranks. The ascending ranks have the stages in order.
        loss: ``loss(output, target)`` returns the loss of a chunk, a mean over its time steps; or a pair (sum, count): see
            `Pipeline`.
        chunks: How many parts of nearly equal length a sequence is cut into; 1 means that the stages take turns.
        cuts: The names of the layers with which the stages but the first begin: "2" is a child of the model, "1.3" layer 3 of
            the stack "1". None measures the layers with `example`, and balances time, then memory. Then all ranks of the job
            make wavefronts of this model, and rank 0's times decide.
        example: An input, such as a batch. The values do not matter.
        stepwise: Further types of layers that compute each time step from that time step alone.
        reduction: "sum" says that the loss of a sequence is the sum of those of its chunks.

    Attributes:
        cuts: The names of the layers with which the stages but the first begin.
        stage: The number of this rank's stage.

    Raises:
        ArgumentError: An argument is wrong, or the model has a layer that cannot take a sequence in chunks. Raised on all
            ranks.

    Examples:
        >>> def trained():
        ...     stack = torch.nn.RNN(1, 1, num_layers=2, nonlinearity="relu", bias=False, batch_first=True)
        ...     model = torch.nn.Sequential(stack)
        ...     for weight in model.parameters():
        ...         torch.nn.init.ones_(weight)
        ...     wavefront = hvd.Wavefront(model, loss=torch.nn.functional.mse_loss, chunks=2, cuts=["0.1"])
        ...     optimizer = torch.optim.SGD(wavefront.parameters(), lr=0.0)
        ...     return wavefront.step(torch.ones(1, 4, 1), torch.zeros(1, 4, 1), optimizer).item()
        >>> on_ranks(2, trained)  # the outputs are 1, 3, 6 and 10: their mean square is 36.5
        [36.5, 36.5]
    """

    def __init__(
        self,
        model: nn.Module,
        process_set: ProcessSet = Everybody,
        *,
        loss: Callable[[Any, Any], Any],
        chunks: int = 8,
        cuts: Sequence[str] | None = None,
        example: torch.Tensor | None = None,
        stepwise: Sequence[type[nn.Module]] = (),
        reduction: str = "mean",
    ) -> None:
        check_count("chunks", chunks)
        self.stage, self._places = rank_in(process_set), size_of(process_set)
        parts = units(model, stepwise)
        refuse_hooks(model)
        self._time = time_dimension(model)
        alone = {name: Alone(layers_of([unit])) for name, unit in parts.items()}
        self.cuts = settle_cuts(model, alone, self._places, cuts, None if example is None else (example,))
        names = list(parts)
        ends = [0, *map(names.index, self.cuts), len(names)]
        stages = [Chunks(layers_of([parts[name] for name in names[a:b]])) for a, b in pairwise(ends)]
        check_stages(stages, [", ".join(names[a:b]) for a, b in pairwise(ends)])
        tied = Tied(shared_parameters(stages), process_set, self.stage)
        super().__init__([stages[self.stage]], process_set, model, tied)
        self._chunks = chunks
        keep_freed_memory(world("Wavefront()").config)
        own = stages[self.stage]

        def call(come: Any, inputs: tuple[Any, ...], keywords: Mapping[str, Any], state: State) -> tuple[Any, State]:
            found: tuple[Any, State] = own(inputs[0] if come is None else come, state)
            return found

        passes = StagePasses(call, self.stage, self._places, self._bubble, "chunk")
        codec = TensorCodec(next(self.parameters()).device)
        relay = Relay(process_set, self.stage, self._places, there_and_back, 1, codec, "wavefront")
        losses = Losses(loss, reduction, self._time, "time steps")
        is_last = self.stage == self._places - 1
        buffers = SharedBuffers(stages, [self.stage])
        self._steps = Steps({self.stage: passes}, relay, losses, is_last, process_set, self._bubble, tied, buffers)

    def step(self, x: torch.Tensor, y: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
        """Train on one batch of sequences. Every rank of the wavefront calls this with the same batch.

        Args:
            x: The input: shape (samples, time steps, ...) if the recurrent layers are ``batch_first``, else (time steps,
                samples, ...).
            y: The target, with the same samples and time steps.
            optimizer: The optimizer of this rank's parameters, plain or distributed: its gradients are set to zero before, and
                it makes a step. None leaves both to the program; gradients are added to those that are there.

        Returns:
            The loss, the same on all ranks of the wavefront: shape ``()``.

        Raises:
            ArgumentError: There are fewer time steps than chunks, or other ones in `y`; or the loss is no mean over them and
                does not say so.
            Exception: See `Pipeline.step`.
        """

        def batch() -> MicroBatches:
            self._check_optimizer(optimizer)
            return self._batch(x, y)

        return self._steps.train(batch, optimizer, self.parameters())

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output for a batch of sequences, on all ranks of the wavefront, without gradients. Every rank calls this.

        The layers are used in the mode in which they are; call `eval` before.

        Raises:
            ArgumentError: There are fewer time steps than chunks.
            Exception: See `Pipeline.step`.
        """
        found: torch.Tensor = self._steps.predict(lambda: self._batch(x, None), self._time)
        return found

    def _batch(self, x: Any, y: Any) -> MicroBatches:
        """Return a batch of sequences in chunks."""
        self._check(x, "x")
        if y is not None:
            self._check(y, "y")
            if y.shape[:2] != x.shape[:2]:
                raise ArgumentError(
                    f"x has the shape {tuple(x.shape)}, and y {tuple(y.shape)}: expected the same samples and time steps."
                )
        return MicroBatches((x,), {}, y, self._chunks, self._time, trains=y is not None)

    def _check(self, sequences: Any, name: str) -> None:
        if not isinstance(sequences, torch.Tensor) or sequences.dim() <= 1:
            found = tuple(sequences.shape) if isinstance(sequences, torch.Tensor) else type(sequences).__name__
            kind = "(samples, time steps, ...)" if self._time else "(time steps, samples, ...)"
            raise ArgumentError(f"{name}: expected a tensor of the shape {kind}; got {found}.")
        steps = sequences.shape[self._time]
        if steps < self._chunks:
            raise ArgumentError(
                f"{name}: {steps} time steps cannot be cut into {self._chunks} chunks (shape {tuple(sequences.shape)}, time "
                f"steps in dimension {self._time}). Choose fewer `chunks`, or longer sequences."
            )

    def report(self) -> str:
        """Return the share of the bubble in the steps so far, and the theoretical one. All ranks of the wavefront call this."""
        return self._bubble.report(self.process_set, self._places, self._chunks, 1, "wavefront", "chunks")
