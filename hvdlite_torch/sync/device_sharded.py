"""``shard=True`` on a GPU: each rank gets its share of the combined gradients, steps it, and all gather the parameters.

::

    backward ─▶ reduce-scatter of each bucket ─▶ step the share ─▶ allgather of each bucket's parameters ─▶ forward

The parameters lie in flat memory like that of the gradients, so nothing is copied to gather them. Checkpoints are those of
`hvdlite_torch.sync.host_sharded`, and of an optimizer that is not sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch

import hvdlite
from hvdlite.gradients.device.parameter_bucket import ParameterBucket
from hvdlite.gradients.device.rules import Rules
from hvdlite.protocols import ReduceOp
from hvdlite_torch.step.options import Options
from hvdlite_torch.step.sharded_step import SharedSteps
from hvdlite_torch.step.shards import refuse_sparse
from hvdlite_torch.sync.device import DeviceExchange


class ShardedDeviceExchange(SharedSteps, DeviceExchange):
    """Exchanges gradients on a device, and lets each rank step its share.

    Args:
        optimizer, options: As for `DeviceExchange`.
    """

    _bucket = ParameterBucket

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self._pieces: list[tuple[torch.nn.Parameter, int, torch.Tensor]] = []
        super().__init__(optimizer, options)

    def _rules(self) -> Rules:
        return Rules(self._average, parts=self._collectives.size, whole=self._whole)

    @torch.no_grad()
    def _follow(self, parameters: list[torch.Tensor], order: Sequence[int]) -> None:
        self._shares.collect(self._in_step.origin)
        super()._follow(parameters, order)
        if self._alone:
            self._pieces = []
            return
        hvdlite.broadcast(parameters, 0, inplace=True, process_set=self.process_set)
        pieces = []
        for bucket in self._parameter_buckets():
            for index, memory in bucket.parameters().items():
                parameter = parameters[index]
                view = memory.view(parameter.shape)
                view.copy_(parameter)
                parameter.data = view
            pieces += bucket.pieces()
        self._squares = torch.zeros(1, dtype=torch.float64, device=parameters[0].device)
        self._device.keep(self._squares, self._collectives.stream)
        self._shares.deal(parameters, [piece for piece, _ in pieces])
        self._pieces = [
            (parameter, piece.tensor, gradient.view(parameter.shape))
            for (piece, gradient), parameter in zip(pieces, self._shares.pieces.values(), strict=True)
        ]

    def _parameter_buckets(self) -> list[ParameterBucket]:
        assert self._reducer is not None
        return cast("list[ParameterBucket]", self._reducer.buckets)

    def _learned(self) -> None:
        # The order of the buckets stays a guess: another would move all parameters.
        self._launch_if_settled()

    def _exchange_dense(self) -> bool:
        self._shares.check_memory()
        return super()._exchange_dense()

    @property
    def _total_weight(self) -> float:
        return self._divisor

    def _give(self, there: Sequence[bool]) -> None:
        for parameter, index, gradient in self._pieces:
            parameter.grad = gradient if there[index] else None

    def after_unscale(self, infinities: Iterable[torch.Tensor]) -> None:
        # This rank's own gradients have been changed, though torch does not count that as a new version.
        if self._reducer is not None and self._reducer.launched:
            self._lose("a GradScaler has unscaled them")
        self._backward.habits.settled = False
        super().after_unscale(infinities)

    def _undo(self, weight: float) -> None:
        # What was sent has been multiplied where it lies, and the shares are not used.
        if weight not in (0.0, 1.0):
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(weight)

    def _make_dense(self, gradients: list[torch.Tensor | None]) -> list[int]:
        if news := super()._make_dense(gradients):
            refuse_sparse(self._gradients.like[news[0]][0])
        return news

    @torch.no_grad()
    def _clip(self) -> None:
        if self._options.max_grad_norm is None:
            return
        if self._reducer is None:
            super()._clip()
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in self._shares.gradients():
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
        factor = (self._options.max_grad_norm / (self._squares[0].sqrt() + 1e-6)).clamp(max=1.0)
        for dtype, gradients in by_dtype.items():
            torch._foreach_mul_(gradients, factor.to(dtype.to_real()))

    def _publish(self) -> None:
        if self._reducer is None:
            return
        stream = self._collectives.stream
        stream.wait(self._device.current().record())
        with self._device.on(stream):
            for bucket in self._parameter_buckets():
                bucket.gather(stream)
        self._reducer.wait()
