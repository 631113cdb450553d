"""What backward passes do with gradients on a device: they are watched in the first steps; later they launch buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.errors import ArgumentError
from hvdlite.gradients.device.loop_profile import LoopProfile
from hvdlite.protocols import Device
from hvdlite_torch.sync.capture import Capture
from hvdlite_torch.sync.device_gradients import DeviceGradients
from hvdlite_torch.sync.gradient_state import TorchGradientState


class BackwardPasses:
    """Of one optimizer, on one rank of several.

    Args:
        gradients: Of the parameters that it trains.
        device: Where they are.
        launches: Buckets may be launched before the step, if the loop's habits allow it.

    Attributes:
        launches: As given.
        habits: What is known of the loop.
        capture: What of a step is captured into a CUDA graph.
    """

    def __init__(self, gradients: DeviceGradients, device: Device, launches: bool) -> None:
        self._device, self.launches = device, launches
        self.habits = LoopProfile(len(gradients.parameters))
        self.capture = Capture()
        self.follow(gradients)

    def follow(self, gradients: DeviceGradients) -> None:
        """Use other buckets for the same parameters."""
        self._gradients = gradients
        self.begin_step()

    def begin_step(self) -> None:
        """What has been done and seen belongs to a step that is over, or to none."""
        if self._gradients.reducer is not None:
            self._gradients.reducer.begin_step()
        self._counts = [0] * len(self._gradients.parameters)
        self._waits_for_end = False
        self.capture.begin_step()

    def check_capture(self, parameters: Sequence[torch.Tensor], weight: float) -> None:
        """Raise if this step is captured into a CUDA graph that cannot be replayed.

        Args:
            parameters: Those of the optimizer.
            weight: This rank's.

        Raises:
            ArgumentError: It is. The text says why.
        """
        try:
            self.capture.check_step(parameters, weight, self.habits.learning)
        except ArgumentError:
            self.begin_step()  # what follows may be steps without a graph
            raise

    def take(self, index: int, parameter: torch.Tensor, weight: float, passes: int) -> bool:
        """A backward pass has added to a gradient.

        Args:
            index, parameter: Of the gradient.
            weight: Of the batch, so far.
            passes: How many there are before a step, as the program has said; 1 if it has not.

        Returns:
            Whether the gradient had been sent already.
        """
        if self.habits.learning:
            self.habits.saw(index, weight, self._device.current().handle)
            self._call_at_end()
            return False
        self._counts[index] += 1
        reducer = self._gradients.reducer
        assert reducer is not None
        if self._counts[index] != (passes if passes > 1 else self.habits.passes[index]):
            return reducer.is_sent(index)
        gradient = parameter.grad
        if (
            self.launches
            and gradient is not None
            and not gradient.requires_grad
            and gradient.layout is torch.strided
            and (gradient.shape, gradient.dtype) == self._gradients.like[index]
            and reducer.ready(index)
        ):  # else the step sees to it
            self._gradients.launch_ready(weight)
            self._call_at_end()
        return False

    def _call_at_end(self) -> None:
        """Have torch call `at_end` when this backward pass is over."""
        if not self._waits_for_end:
            self._waits_for_end = True
            torch.autograd.Variable._execution_engine.queue_callback(self.at_end)

    def at_end(self) -> None:
        """A backward pass is over."""
        self._waits_for_end = False
        if self.habits.learning:
            self.habits.pass_over(TorchGradientState(self._gradients.now()))
        elif self._gradients.reducer is not None:
            self._gradients.reducer.wait()  # whoever looks at gradients now is to see combined ones
