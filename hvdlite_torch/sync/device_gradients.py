"""``p.grad`` of parameters on a device, as views of the buckets in which they are exchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.gradients.device.bucket import DeviceBucket, Layout
from hvdlite.gradients.device.reducer import DeviceReducer
from hvdlite.gradients.header import Header
from hvdlite.protocols import Device
from hvdlite_torch.tensors.adapter import ADAPTER
from hvdlite_torch.tensors.gradient import as_dense


class DeviceGradients:
    """The gradients of some parameters.

    Args:
        parameters: Their gradients are exchanged, as dense ones.
        reducer: With a gradient for each; None if this rank is alone, and there is nothing to exchange.

    Attributes:
        parameters, reducer: As given.
        like: Shape and dtype of each parameter, when this was made: all ranks have agreed on them.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], reducer: DeviceReducer | None) -> None:
        self.parameters, self.reducer = parameters, reducer
        self.like = [(parameter.shape, parameter.dtype) for parameter in parameters]

    def now(self) -> list[torch.Tensor | None]:
        """``p.grad`` of each parameter."""
        return [parameter.grad for parameter in self.parameters]

    def make_dense(self, gradients: list[torch.Tensor | None], sparse_as_dense: bool) -> list[int]:
        """Replace sparse gradients by dense ones where that is wanted. Returns the numbers of the others.

        Raises:
            ArgumentError, UnsupportedTensorError: As `as_dense`.
        """
        news = []
        for index, (gradient, like) in enumerate(zip(gradients, self.like, strict=True)):
            if gradient is None or (gradient.layout is torch.strided and (gradient.shape, gradient.dtype) == like):
                continue
            gradients[index] = as_dense(gradient, *like, sparse_as_dense)
            if gradients[index] is None:
                news.append(index)
        return news

    def divide(self, divisor: float) -> None:
        """Divide ``p.grad`` of each parameter, in place."""
        for gradient in self.now() if divisor != 1.0 else ():
            if gradient is not None:
                gradient.div_(divisor)

    @torch.no_grad()
    def launch_ready(self, weight: float) -> None:
        """Launch the buckets that can be before the step."""
        reducer = self.reducer
        assert reducer is not None
        while (bucket := reducer.next_ready()) is not None:
            gradients = [self.parameters[index].grad for index in bucket.tensors]
            reducer.launch_early(bucket, gradients, weight)
            self._give(bucket, [gradient is not None for gradient in gradients])

    def finish(self, gradients: Sequence[torch.Tensor | None], said: Header) -> None:
        """Launch what has not been yet: see `DeviceReducer.finish`. Afterwards ``p.grad`` are views of the buckets."""
        assert self.reducer is not None
        late = self.reducer.buckets[self.reducer.launched :]
        self.reducer.finish(gradients, said)
        for bucket in late:
            self._give(bucket, [gradients[index] is not None for index in bucket.tensors])

    def give(self, there: Sequence[bool]) -> None:
        """Let those parameters have the combined gradient of which `there` says that some rank has one."""
        assert self.reducer is not None
        for bucket in self.reducer.buckets:
            self._give(bucket, [there[index] for index in bucket.tensors])

    def _give(self, bucket: DeviceBucket, there: Sequence[bool]) -> None:
        now = [self.parameters[index].grad if each else None for index, each in zip(bucket.tensors, there, strict=True)]
        for index, each, home in zip(bucket.tensors, there, bucket.at_home(now), strict=True):
            if each and not home:
                # A tensor object of its own, of which changes count as new versions.
                self.parameters[index].grad = bucket.views[index].detach()


class SentBefore:
    """The memory of gradients that had been sent, and not been used by a step, when an earlier world ended."""

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []

    def remember(self, reducer: DeviceReducer) -> None:
        """The world of `reducer` has ended."""
        self._memory += reducer.sent_memory()

    def problem(self, device: Device, parameters: Sequence[torch.Tensor]) -> str:
        """Whether a step is about to use such gradients, in words; empty if not. Asked once, they are forgotten.

        Args:
            device: Where they are.
            parameters: Those of the optimizer.
        """
        sent, self._memory = set(map(device.allocation, self._memory)), []
        gradients = [parameter.grad for parameter in parameters] if sent else []
        if any([gradient is not None and device.allocation(gradient) in sent for gradient in gradients]):
            return "shutdown() and init() came between the backward pass and the step (zero_grad() and another pass mend that)"
        return ""


def layout_of(parameters: Sequence[torch.Tensor]) -> Layout:
    """What the gradients of parameters are like: in the order of their memory, if that has no gaps (``channels_last``)."""
    return [(ADAPTER.info(parameter), torch.empty_like(parameter, device="meta").stride()) for parameter in parameters]
