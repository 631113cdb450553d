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
from hvdlite.gpu.collectives import DeviceCollectives
from hvdlite.protocols import ReduceOp, Stream, TensorInfo
from hvdlite_torch.step.options import Options
from hvdlite_torch.step.sharded_step import SharedSteps
from hvdlite_torch.step.shards import refuse_sparse
from hvdlite_torch.sync.device import DeviceExchange
from hvdlite_torch.sync.device_bucket import DeviceBucket, Rules


class ShardedDeviceExchange(SharedSteps, DeviceExchange):
    """Exchanges gradients on a device, and lets each rank step its share.

    Args:
        optimizer, options: As for `DeviceExchange`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self._gradients: list[tuple[torch.nn.Parameter, int, torch.Tensor]] = []
        super().__init__(optimizer, options)

    def _rules(self) -> Rules:
        return Rules(self._average, None, self._collectives.size, self._whole)

    def _make_bucket(
        self, infos: Sequence[TensorInfo], parameters: Sequence[torch.Tensor], group: Sequence[int]
    ) -> ParameterBucket:
        return ParameterBucket(infos, parameters, group, self._place, self._collectives, self._rules())

    @torch.no_grad()
    def _follow(self, parameters: list[torch.Tensor], order: Sequence[int]) -> None:
        self._shares.collect(self._in_step.origin)
        super()._follow(parameters, order)
        if self._alone:
            self._gradients = []
            return
        hvdlite.broadcast(parameters, 0, inplace=True, process_set=self.process_set)
        pieces = []
        for bucket in self._parameter_buckets():
            bucket.take(parameters)
            pieces += bucket.pieces()
        self._squares = torch.zeros(1, dtype=torch.float64, device=self._place)
        self._device.keep(self._squares, self._stream)
        self._shares.deal(parameters, [piece for piece, _ in pieces])
        self._gradients = [
            (parameter, piece.tensor, gradient.view(parameter.shape))
            for (piece, gradient), parameter in zip(pieces, self._shares.pieces.values(), strict=True)
        ]

    def _parameter_buckets(self) -> list[ParameterBucket]:
        return cast("list[ParameterBucket]", self._buckets)

    def _learned(self) -> None:
        # The order of the buckets stays a guess: another would move all parameters.
        self._launches_early = self._launches_early and self._habits.settled

    def _exchange_dense(self) -> bool:
        self._shares.check_memory()
        return super()._exchange_dense()

    @property
    def _total_weight(self) -> float:
        return self._divisor

    def _give(self, there: Sequence[bool]) -> None:
        for parameter, index, gradient in self._gradients:
            parameter.grad = gradient if there[index] else None

    def after_unscale(self, infinities: Iterable[torch.Tensor]) -> None:
        # This rank's own gradients have been changed, though torch does not count that as a new version.
        if self._launched:
            self._lose("a GradScaler has unscaled them")
        self._habits.settled = False
        super().after_unscale(infinities)

    def _undo(self, weight: float) -> None:
        # What was sent has been multiplied where it lies, and the shares are not used.
        if weight not in (0.0, 1.0):
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(weight)

    def _check_sparse(self, index: int) -> None:
        refuse_sparse(self._shapes[index][0])

    @torch.no_grad()
    def _clip(self) -> None:
        if self._options.max_grad_norm is None:
            return
        if self._alone:
            super()._clip()
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in self._shares.gradients():
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        self._squares.zero_()
        for dtype, gradients in by_dtype.items():
            wide = torch.complex128 if dtype.is_complex else torch.float64
            self._squares.add_(torch.stack(torch._foreach_norm(gradients, 2, wide)).square().sum())
        self._stream.wait(self._device.current().record())
        self._collectives.allreduce(self._squares, ReduceOp.SUM, self._stream)
        self._wait()
        # As `hvdlite_torch.step.shards.clip_factor`, where the host does not know the norm.
        factor = (self._options.max_grad_norm / (self._squares[0].sqrt() + 1e-6)).clamp(max=1.0)
        for dtype, gradients in by_dtype.items():
            torch._foreach_mul_(gradients, factor.to(dtype.to_real()))

    def _publish(self) -> None:
        if self._alone:
            return
        stream = self._stream
        stream.wait(self._device.current().record())
        with self._device.on(stream):
            for bucket in self._parameter_buckets():
                bucket.gather(stream)
        self._wait()


class ParameterBucket(DeviceBucket):
    """Gradients, and their parameters in flat memory of the same layout.

    Args:
        infos, parameters, tensors, place, collectives, rules: As for `DeviceBucket`.
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        parameters: Sequence[torch.Tensor],
        tensors: Sequence[int],
        place: torch.device,
        collectives: DeviceCollectives,
        rules: Rules,
    ) -> None:
        super().__init__(infos, parameters, tensors, place, collectives, rules)
        self._memories = [torch.zeros_like(flat.memory) for flat in self.flats]

    def memory(self) -> list[torch.Tensor]:
        return [*super().memory(), *self._memories]

    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """Let the parameters lie here, with their values."""
        for flat, memory in zip(self.flats, self._memories, strict=True):
            for index, span in flat.block.spans.items():
                view = memory[span.start : span.stop].view(parameters[index].shape)
                view.copy_(parameters[index])
                parameters[index].data = view

    def gather(self, stream: Stream) -> None:
        """Let all ranks have everybody's share of the parameters."""
        with self.collectives.group():
            for flat, memory in zip(self.flats, self._memories, strict=True):
                start, stop = flat.block.bounds[self.collectives.rank :][:2]
                self.collectives.allgather(memory[start:stop], memory, flat.counts(), stream)
