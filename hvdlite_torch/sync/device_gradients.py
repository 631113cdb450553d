"""`DeviceGradients`: ``p.grad`` of each parameter on a device is a view of the bucket that combines it."""

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
    """The gradients of some parameters on a device, on one rank.

    Args:
        parameters: The parameters whose gradients are combined as dense ones.
        reducer: Has one gradient for each parameter; None if this rank is alone and nothing is combined.

    Attributes:
        like: The shape and dtype of each parameter when this object was made. All ranks have agreed on them.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], reducer: DeviceReducer | None) -> None:
        self.parameters, self.reducer = parameters, reducer
        self.like = [(parameter.shape, parameter.dtype) for parameter in parameters]

    def now(self) -> list[torch.Tensor | None]:
        """Return ``p.grad`` of each parameter."""
        return [parameter.grad for parameter in self.parameters]

    def make_dense(self, gradients: list[torch.Tensor | None], sparse_as_dense: bool) -> list[int]:
        """Replace sparse gradients in the list by dense gradients if `sparse_as_dense`, and by None otherwise.

        Returns:
            The numbers of the gradients that are sparse and stay so.

        Raises:
            ArgumentError, UnsupportedTensorError: `as_dense` refuses a gradient.
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
        """Divide ``p.grad`` of each parameter by `divisor`, in place."""
        for gradient in self.now() if divisor != 1.0 else ():
            if gradient is not None:
                gradient.div_(divisor)

    @torch.no_grad()
    def launch_ready(self, weight: float) -> None:
        """Launch the buckets whose gradients are complete, before the step. `weight` is this rank's number of samples."""
        reducer = self.reducer
        assert reducer is not None
        while (bucket := reducer.next_ready()) is not None:
            gradients = [self.parameters[index].grad for index in bucket.tensors]
            at_home = reducer.launch_early(bucket, gradients, weight)
            self._give(bucket, [gradient is not None for gradient in gradients], at_home)

    def finish(self, gradients: Sequence[torch.Tensor | None], said: Header) -> None:
        """Launch the remaining buckets, as `DeviceReducer.finish` says. Afterwards each ``p.grad`` is a view of its bucket."""
        assert self.reducer is not None
        for bucket, at_home in self.reducer.finish(gradients, said):
            self._give(bucket, [gradients[index] is not None for index in bucket.tensors], at_home)

    def give(self, there: Sequence[bool]) -> None:
        """Set ``p.grad`` to the combined gradient, for each parameter for which `there` says that some rank has a gradient."""
        assert self.reducer is not None
        for bucket in self.reducer.buckets:
            now = [self.parameters[index].grad for index in bucket.tensors]
            self._give(bucket, [there[index] for index in bucket.tensors], bucket.at_home(now))

    def _give(self, bucket: DeviceBucket, there: Sequence[bool], at_home: Sequence[bool]) -> None:
        for index, each, home in zip(bucket.tensors, there, at_home, strict=True):
            if each and not home:
                # Each parameter gets its own tensor object: changes of it count as new versions.
                self.parameters[index].grad = bucket.views[index].detach()


class SentBefore:
    """Remembers the gradients that were sent in an earlier world, and that no step has used before that world ended."""

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []

    def remember(self, reducer: DeviceReducer) -> None:
        """Remember what `reducer` has sent. The world of the reducer has ended."""
        self._memory += reducer.sent_memory()

    def problem(self, device: Device, parameters: Sequence[torch.Tensor]) -> str:
        """Return in words why a step must not use the present gradients; an empty text if it may. Forget what was remembered.

        Args:
            device: The device of the parameters.
            parameters: The parameters of the optimizer.
        """
        sent, self._memory = set(map(device.allocation, self._memory)), []
        gradients = [parameter.grad for parameter in parameters] if sent else []
        if any([gradient is not None and device.allocation(gradient) in sent for gradient in gradients]):
            return "shutdown() and init() came between the backward pass and the step (zero_grad() and another pass mend that)"
        return ""


def layout_of(parameters: Sequence[torch.Tensor]) -> Layout:
    """Return dtype, shape and strides of each gradient. Strides are those of the parameter if its memory has no gaps."""
    return [(ADAPTER.info(parameter), torch.empty_like(parameter, device="meta").stride()) for parameter in parameters]
