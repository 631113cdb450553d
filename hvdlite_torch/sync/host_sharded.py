"""The sharded step: each rank steps its share of the parameters, and the others see the new values in the same memory.

The parameters of the ranks of a host lie in one memory. A step reduces a gradient only where it is needed, and nothing is
gathered afterwards on one host::

    backward on every rank ─▶ meet ─▶ rank r sums part r of all gradients, steps part r of the parameters ─▶ meet ─▶ forward

The optimizer's own code does the stepping: for the time of a step its groups hold this rank's pieces of the parameters.
Where each element is stepped by itself (Adam, SGD, …) the parts are equal and a parameter may be cut in two; for all other
optimizers whole parameters are dealt out. This is the idea of ZeRO (Rajbhandari et al., arXiv:1910.02054), stages 1 and 2,
without its communication where ranks share memory.

What differs from an optimizer that is not sharded: all ranks start with the parameters of the first rank, and those of one
host are the same memory, so a change in place that each rank makes for itself is made several times. After a step ``p.grad``
means nothing. ``state_dict()`` and ``load_state_dict()`` are called by every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite.gradients.layout import Piece
from hvdlite.gradients.sharded_reducer import ShardedReducer
from hvdlite.protocols import Plan, TensorInfo
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.step.own_parameters import versions_of
from hvdlite_torch.step.shard_state import cut
from hvdlite_torch.step.sharding import Sharding
from hvdlite_torch.step.shards import clip_factor, squared_norm
from hvdlite_torch.sync.host_gradients import HostGradients
from hvdlite_torch.sync.slot import Slot, Where, as_tensor
from hvdlite_torch.tensors.gradient import gradient_dtype


class HostShards:
    """This rank's shard of parameters and combined gradients in host memory, as `hvdlite.gradients.sync.Results`.

    Args:
        context: The optimizer.
        sharding: Deals the parameters out.

    Raises:
        ArgumentError: Gradients are to be exchanged while backward passes go on.
    """

    def __init__(self, context: OptimizerContext, sharding: Sharding) -> None:
        if context.options.overlap:
            raise ArgumentError(
                "overlap=True has no meaning with shard=True: a rank's share is summed by its own step."
            )
        self._context = context
        self._sharding = sharding
        self._shards = sharding.shards
        self._reducer: ShardedReducer
        self._parameters: Sequence[torch.Tensor] = []
        self._versions: list[int] | None = None
        """Of the parameters, after the last step; None if ranks may have different ones."""
        self._gradients: HostGradients | None = None
        self._homes: list[tuple[Piece, torch.nn.Parameter, Slot, list[torch.Tensor]]] = []
        """Of each piece: the parameter that is stepped, and where its gradient is, in each buffer, if it is not its own."""

    @torch.no_grad()
    def make_reducer(
        self, parameters: Sequence[torch.Tensor], infos: Sequence[TensorInfo], plan: Plan
    ) -> ShardedReducer:
        """Deal the parameters out, in memory that the ranks of a host share. Every rank calls this.

        Args:
            parameters: All that are trained.
            infos: What is exchanged for the gradient of each.
            plan: How to exchange.

        Raises:
            ArgumentError: The gradients of a parameter are of another dtype.
        """
        for parameter in parameters:
            if gradient_dtype(parameter) is not parameter.dtype:
                raise ArgumentError(
                    f"a parameter of {parameter.dtype} with grad_dtype={gradient_dtype(parameter)} cannot be sharded: leave "
                    "out shard=True, or grad_dtype."
                )
        context = self._context
        self._sharding.collect()
        reducer = context.group.reducers.make_sharded(infos, context.options.op, plan, whole=self._sharding.whole)
        hvdlite.broadcast(parameters, 0, inplace=True, process_set=context.process_set)
        shared = [as_tensor(reducer.parameters_of(n), parameter) for n, parameter in enumerate(parameters)]
        for parameter, memory in zip(parameters, shared, strict=True):
            memory.copy_(parameter)  # the same values, from every rank of the host
        reducer.meet()
        for parameter, memory in zip(parameters, shared, strict=True):
            parameter.data = memory
        self._reducer, self._parameters = reducer, parameters
        self._shards.deal(parameters, reducer.pieces)
        context.lease.share(parameters)
        self._versions = versions_of(parameters)
        return reducer

    def follow(self, gradients: HostGradients) -> None:
        """The gradients of the parameters lie there from now on."""
        self._gradients = gradients
        self._homes = [
            (piece, parameter, gradients.slots[piece.tensor], [self._piece_in(buffer, piece) for buffer in (0, 1)])
            for piece, parameter in self._shards.pieces.items()
        ]

    def _piece_in(self, buffer: int, piece: Piece) -> torch.Tensor:
        memory = self._reducer.memory_of(piece.tensor, buffer)
        return cut(as_tensor(memory, self._parameters[piece.tensor]), piece)

    def check_memory(self) -> None:
        """Raise if a parameter is not where it was dealt out."""
        self._shards.check_memory()

    def changed(self) -> bool:
        """Whether the program has changed parameters in place since the last step: on each rank, so more than once."""
        return self._versions is not None and self._versions != versions_of(self._parameters)

    @property
    def total_weight(self) -> float:
        """See `Results.total_weight`."""
        return self._reducer.divisor

    def gradients(self) -> list[torch.Tensor]:
        """Those of this rank's pieces."""
        return self._shards.gradients()

    def clip(self, max_norm: float) -> None:
        """See `Results.clip`."""
        gradients = self._shards.gradients()
        factor = clip_factor(self._reducer.sum_over_ranks(squared_norm(gradients)), max_norm)
        for gradient in gradients:
            gradient.mul_(factor)

    def give(self, there: Sequence[bool]) -> None:
        """Let the pieces have their combined gradients."""
        for piece, parameter, slot, homes in self._homes:
            whole = self._parameters[piece.tensor].grad if slot.where is Where.OWN else None
            # Another object each time: an optimizer's step may give that other memory (``p.grad.data = …``).
            combined = homes[slot.pool.number].data if whole is None else cut(whole, piece)
            parameter.grad = combined if there[piece.tensor] else None
        assert self._gradients is not None
        self._gradients.forget()

    def publish(self) -> None:
        """The pieces have been stepped: let all ranks have them."""
        self._reducer.publish()
        self._versions = versions_of(self._parameters)

    def have_same_state(self) -> None:
        """All ranks have been given the same parameters, maybe by changes in place."""
        self._versions = None

    def leave(self) -> None:
        """Hold nothing of the world any more: it has ended."""
        self._homes = []
        self._gradients = None
        self._versions = None
