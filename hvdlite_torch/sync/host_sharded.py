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
from typing import Any

import torch

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite.gradients.layout import Piece
from hvdlite.gradients.sharded_reducer import ShardedReducer
from hvdlite.protocols import Plan
from hvdlite_torch.step.options import Options
from hvdlite_torch.step.own_parameters import versions_of
from hvdlite_torch.step.shard_state import cut
from hvdlite_torch.step.sharded_step import SharedSteps
from hvdlite_torch.step.shards import clip_factor, refuse_sparse, squared_norm
from hvdlite_torch.sync.host import GradientExchange
from hvdlite_torch.sync.slot import Slot, Where, as_tensor
from hvdlite_torch.tensors.adapter import ADAPTER
from hvdlite_torch.tensors.gradient import gradient_dtype


class ShardedExchange(SharedSteps, GradientExchange):
    """Exchanges gradients in host memory, and lets each rank step its share.

    Args:
        optimizer, options: As for `GradientExchange`.
    """

    _reducer: ShardedReducer
    _versions: list[int] | None = None
    """Of the parameters, after the last step; None if ranks may have different ones."""

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        if options.overlap:
            raise ArgumentError(
                "overlap=True has no meaning with shard=True: a rank's share is summed by its own step."
            )
        super().__init__(optimizer, options)

    @torch.no_grad()
    def _make_reducer(self, parameters: list[torch.Tensor], plan: Plan) -> ShardedReducer:
        for parameter in parameters:
            if gradient_dtype(parameter) is not parameter.dtype:
                raise ArgumentError(
                    f"a parameter of {parameter.dtype} with grad_dtype={gradient_dtype(parameter)} cannot be sharded: leave "
                    "out shard=True, or grad_dtype."
                )
        infos = [ADAPTER.info(parameter) for parameter in parameters]
        self._shares.collect(self._in_step.origin)
        reducer = self._world.group(self.process_set).reducers.make_sharded(
            infos, self._options.op, plan._replace(spare=True), whole=self._whole
        )
        hvdlite.broadcast(parameters, 0, inplace=True, process_set=self.process_set)
        shared = [as_tensor(reducer.parameters_of(n), parameter) for n, parameter in enumerate(parameters)]
        for parameter, memory in zip(parameters, shared, strict=True):
            memory.copy_(parameter)  # the same values, from every rank of the host
        reducer.meet()
        for parameter, memory in zip(parameters, shared, strict=True):
            parameter.data = memory
        self._parameters = parameters
        self._shares.deal(parameters, reducer.pieces)
        self.lease.share(parameters)
        self._versions = versions_of(parameters)
        return reducer

    def _changed(self) -> bool | None:
        return self._versions is not None and self._versions != versions_of(self._parameters)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        super()._after_step(optimizer, args, kwargs)
        self._versions = versions_of(self._parameters)

    def have_same_state(self) -> None:
        super().have_same_state()
        self._versions = None

    def _follow(self, plan: Plan, parameters: list[torch.Tensor]) -> None:
        super()._follow(plan, parameters)
        self._homes = [
            (piece, parameter, self._slots[piece.tensor], [self._piece_in(buffer, piece) for buffer in (0, 1)])
            for piece, parameter in self._shares.pieces.items()
        ]
        """Of each piece: the parameter that is stepped, and where its gradient is, in each buffer, if it is not its own."""

    def _piece_in(self, buffer: int, piece: Piece) -> torch.Tensor:
        memory = self._reducer.memory_of(piece.tensor, buffer)
        return cut(as_tensor(memory, self._parameters[piece.tensor]), piece)

    @property
    def _total_weight(self) -> float:
        return self._reducer.divisor

    def leave(self) -> None:
        super().leave()
        self._homes = []
        self._versions = None

    def _publish(self) -> None:
        self._reducer.publish()

    def _clip(self) -> None:
        if self._options.max_grad_norm is None:
            return
        gradients = self._shares.gradients()
        factor = clip_factor(self._reducer.sum_over_ranks(squared_norm(gradients)), self._options.max_grad_norm)
        for gradient in gradients:
            gradient.mul_(factor)

    def _check_sparse(self, slot: Slot) -> None:
        refuse_sparse(slot.shape)

    def _check_parameters(self) -> None:
        self._shares.check_memory()

    def _deliver(self, anywhere: list[bool]) -> None:
        self._give(anywhere)

    def _give(self, there: Sequence[bool]) -> None:
        for piece, parameter, slot, homes in self._homes:
            whole = self._parameters[piece.tensor].grad if slot.where is Where.OWN else None
            # Another object each time: an optimizer's step may give that other memory (``p.grad.data = …``).
            combined = homes[self._reducer.buffer_of(piece.tensor)].data if whole is None else cut(whole, piece)
            parameter.grad = combined if there[piece.tensor] else None
        assert self._large is not None
        self._large.forget()
