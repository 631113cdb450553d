"""``shard=True`` on a GPU: each rank gets its shard of the combined gradients, steps it, and all gather the parameters.

::

    backward ─▶ reduce-scatter of each bucket ─▶ step the shard ─▶ allgather of each bucket's parameters ─▶ forward

The parameters lie in flat memory like that of the gradients, so nothing is copied to gather them. Checkpoints are those of
`hvdlite_torch.sync.host_sharded`, and of an optimizer that is not sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

import hvdlite
from hvdlite.gpu.collectives import DeviceCollectives
from hvdlite.gradients.device.parameter_bucket import ParameterBucket
from hvdlite.gradients.device.reducer import DeviceReducer
from hvdlite.protocols import ReduceOp
from hvdlite_torch.step.context import OptimizerContext
from hvdlite_torch.step.sharding import Sharding
from hvdlite_torch.step.shards import refuse_sparse
from hvdlite_torch.sync.whole import WholeResults
from hvdlite_torch.tensors.adapter import ADAPTER


class DeviceShards:
    """This rank's shard of parameters and combined gradients on a device, as `hvdlite.gradients.sync.Results`.

    Args:
        context: The optimizer.
        sharding: Deals the parameters out.

    Attributes:
        whole: Parameters are dealt out whole.
    """

    def __init__(self, context: OptimizerContext, sharding: Sharding) -> None:
        self._context = context
        self._sharding = sharding
        self._shards = sharding.shards
        self.whole = sharding.whole
        self._alone = WholeResults(context)
        self._reducer: DeviceReducer | None = None
        """None if this rank is alone: it steps whole parameters."""
        self._pieces: list[tuple[torch.nn.Parameter, int, torch.Tensor]] = []
        """Of each piece: the parameter that is stepped, the number of the whole one, and its combined gradient."""

    def collect(self) -> None:
        """Let the optimizer have the state of whole parameters, before they are dealt out anew. Every rank calls this."""
        self._sharding.collect()

    @torch.no_grad()
    def deal(
        self, parameters: Sequence[torch.Tensor], reducer: DeviceReducer | None, collectives: DeviceCollectives
    ) -> None:
        """Deal the parameters out, and let them lie in the reducer's memory. Every rank calls this.

        Args:
            parameters: All that are trained.
            reducer: With a `ParameterBucket` for each of its buckets; None if this rank is alone.
            collectives: Over the ranks that take part.
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
        """Raise if a parameter is not where it was dealt out."""
        self._shards.check_memory()

    def refuse_sparse(self, shape: Sequence[int]) -> None:
        """Raise for a parameter of this shape, which has a sparse gradient."""
        refuse_sparse(shape)

    @property
    def total_weight(self) -> float:
        """See `Results.total_weight`."""
        return 0.0 if self._reducer is None else self._reducer.told.divisor

    def gradients(self) -> list[torch.Tensor]:
        """Those of this rank's pieces; of whole parameters, if it is alone."""
        return self._alone.gradients() if self._reducer is None else self._shards.gradients()

    def give(self, there: Sequence[bool]) -> None:
        """Let the pieces have their combined gradients."""
        for parameter, index, gradient in self._pieces:
            parameter.grad = gradient if there[index] else None

    @torch.no_grad()
    def clip(self, max_norm: float) -> None:
        """See `Results.clip`. The host does not wait for the norm."""
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
        # As `hvdlite_torch.step.shards.clip_factor`, where the host does not know the norm.
        factor = (max_norm / (self._squares[0].sqrt() + 1e-6)).clamp(max=1.0)
        for dtype, gradients in by_dtype.items():
            torch._foreach_mul_(gradients, factor.to(dtype.to_real()))

    def publish(self) -> None:
        """The pieces have been stepped: let all ranks have them."""
        if self._reducer is None:
            return
        stream = self._collectives.stream
        stream.wait(self._device.current().record())
        with self._device.on(stream):
            for bucket in self._buckets():
                bucket.gather(stream)
        self._reducer.wait()
