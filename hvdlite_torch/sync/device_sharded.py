"""`DeviceShards`: ``shard=True`` on a GPU.

Each rank gets its shard of the combined gradients and steps this shard; then all ranks gather the parameters::

    backward ─▶ reduce-scatter of each bucket ─▶ step the shard ─▶ allgather of each bucket's parameters ─▶ forward

The parameters lie in flat memory with the layout of the gradients, so the allgather needs no copy. Checkpoints are the same as
those of `hvdlite_torch.sync.host_sharded`, and of an optimizer that is not sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

import hvdlite
from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.gradients.device.bucket import ParameterBucket
from hvdlite.gradients.device.reducer import DeviceReducer
from hvdlite.protocols import ReduceOp
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.step.sharding import Sharding
from hvdlite_torch.sync.whole import WholeResults
from hvdlite_torch.tensors.adapter import ADAPTER


class DeviceShards:
    """The `CombinedGradients` of a sharded optimizer on a device: this rank's shard.

    Args:
        context: The optimizer.
        sharding: Deals the parameters out.

    Attributes:
        whole: Parameters are dealt out whole; if False, a parameter may be cut between ranks.
    """

    def __init__(self, context: OptimizerContext, sharding: Sharding) -> None:
        self._context = context
        self._sharding = sharding
        self._shards = sharding.shards
        self.whole = sharding.whole
        self._alone = WholeResults(context)
        self._reducer: DeviceReducer | None = None
        """The present buckets; None if this rank is alone and steps whole parameters."""
        self._pieces: list[tuple[torch.nn.Parameter, int, torch.Tensor]] = []
        """For each piece: the parameter that the optimizer steps, the number of the whole parameter, and the combined gradient.
        """

    def collect(self) -> None:
        """Give the optimizer the state of whole parameters, before parameters are dealt out anew. Every rank calls this."""
        self._sharding.collect()
        self.leave()  # frees memory for the new gradients

    @torch.no_grad()
    def deal(
        self, parameters: Sequence[torch.Tensor], reducer: DeviceReducer | None, collectives: DeviceCollectives
    ) -> None:
        """Deal the parameters out, and move them to the reducer's memory. Every rank calls this.

        Args:
            parameters: All parameters that are trained.
            reducer: All its buckets are `ParameterBucket`; None if this rank is alone.
            collectives: The collectives of the ranks that take part.
        """
        self._reducer, self._collectives, self._pieces = reducer, collectives, []
        if reducer is None:
            return
        hvdlite.broadcast(parameters, 0, inplace=True, process_set=self._context.process_set)
        pieces = []
        for bucket in self._buckets():
            for index, memory in bucket.parameters().items():
                parameter = parameters[index]
                view = memory.view(parameter.shape)
                view.copy_(parameter)
                parameter.data = view
            pieces += bucket.pieces()
        self._device = ADAPTER.device(parameters[0])
        self._squares = torch.zeros(1, dtype=torch.float64, device=parameters[0].device)
        self._device.keep(self._squares, collectives.stream)
        self._shards.deal(parameters, [piece for piece, _ in pieces])
        self._pieces = [
            (parameter, piece.tensor, gradient.view(parameter.shape))
            for (piece, gradient), parameter in zip(pieces, self._shards.pieces.values(), strict=True)
        ]

    def _buckets(self) -> list[ParameterBucket]:
        assert self._reducer is not None
        return cast("list[ParameterBucket]", self._reducer.buckets)

    def check_memory(self) -> None:
        """Raise ArgumentError if a parameter was given other memory since it was dealt out."""
        self._shards.check_memory()

    @property
    def total_weight(self) -> float:
        """Return the sum of the weights of all ranks in the last step in which this rank had no data."""
        return 0.0 if self._reducer is None else self._reducer.told.divisor

    def gradients(self) -> list[torch.Tensor]:
        """Return the combined gradients of this rank's pieces; of whole parameters if this rank is alone."""
        return self._alone.gradients() if self._reducer is None else self._shards.gradients()

    def give(self, there: Sequence[bool]) -> None:
        """Give each piece its combined gradient, or None if `there` says that no rank has a gradient of the parameter."""
        for parameter, index, gradient in self._pieces:
            parameter.grad = gradient if there[index] else None

    @torch.no_grad()
    def clip(self, max_norm: float) -> None:
        """Scale the gradients to a norm of at most `max_norm`. The host does not wait for the norm."""
        if self._reducer is None:
            self._alone.clip(max_norm)
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in self._shards.gradients():
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        self._squares.zero_()
        for dtype, gradients in by_dtype.items():
            wide = torch.complex128 if dtype.is_complex else torch.float64
            self._squares.add_(torch.stack(torch._foreach_norm(gradients, 2, wide)).square().sum())
        stream = self._collectives.stream
        stream.wait(self._device.current().record())
        self._collectives.allreduce(self._squares, ReduceOp.SUM, stream)
        self._reducer.wait()
        # The same formula as `hvdlite_torch.step.shards.clip_factor`; the host does not know the norm.
        factor = (max_norm / (self._squares[0].sqrt() + 1e-6)).clamp(max=1.0)
        for dtype, gradients in by_dtype.items():
            torch._foreach_mul_(gradients, factor.to(dtype.to_real()))

    def publish(self) -> None:
        """Let all ranks gather the parameters, after each rank has stepped its pieces."""
        if self._reducer is None:
            return
        stream = self._collectives.stream
        stream.wait(self._device.current().record())
        with self._device.on(stream):
            for bucket in self._buckets():
                bucket.gather(stream)
        self._reducer.wait()

    def leave(self) -> None:
        """Drop what belongs to the world that has ended."""
        self._reducer, self._pieces = None, []
