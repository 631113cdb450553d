"""`BackwardPasses`: backward passes teach the loop profile in the first steps; later they launch buckets."""

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
    """Watches the backward passes of one optimizer, on one of several ranks.

    Args:
        gradients: The gradients of the parameters that the optimizer trains.
        device: The device of the parameters.
        launches: Whether buckets may be launched before the step, if the loop profile allows it.

    Attributes:
        profile: The profile of the training loop.
        capture: Knows which parts of the present step are captured into a CUDA graph.
    """

    def __init__(self, gradients: DeviceGradients, device: Device, launches: bool) -> None:
        self._device, self.launches = device, launches
        self.profile = LoopProfile(len(gradients.parameters))
        self.capture = Capture()
        self.follow(gradients)

    def follow(self, gradients: DeviceGradients) -> None:
        """Use the buckets of `gradients` from now on. The parameters are the same."""
        self._gradients = gradients
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what backward passes have done since the last step."""
        if self._gradients.reducer is not None:
            self._gradients.reducer.begin_step()
        self._counts = [0] * len(self._gradients.parameters)
        self._waits_for_end = False
        self.capture.begin_step()

    def check_capture(self, parameters: Sequence[torch.Tensor], weight: float) -> None:
        """Raise if this step is captured into a CUDA graph that cannot be replayed.

        Args:
            parameters: The parameters of the optimizer.
            weight: The number of samples of this rank.

        Raises:
            ArgumentError: The graph cannot be replayed. The text says why.
        """
        try:
            self.capture.check_step(parameters, weight, self.profile.learning)
        except ArgumentError:
            self.begin_step()  # what follows may be steps without a graph
            raise

    def take(self, index: int, parameter: torch.Tensor, weight: float, passes: int) -> bool:
        """Note that a backward pass has added to a gradient, and launch the buckets that are complete.

        Args:
            index: The number of the parameter.
            parameter: The parameter, with its gradient.
            weight: The batch weight, as far as the program has said it.
            passes: How many backward passes the program has announced for a step; 1 if it has announced none.

        Returns:
            True if the gradient was sent before this pass, so that the sent gradient is incomplete.
        """
        if self.profile.learning:
            self.profile.saw(index, weight, self._device.current().handle)
            self._call_at_end()
            return False
        self._counts[index] += 1
        reducer = self._gradients.reducer
        assert reducer is not None
        if self._counts[index] != (passes if passes > 1 else self.profile.passes[index]):
            return reducer.is_sent(index)
        gradient = parameter.grad
        if (
            self.launches
            and gradient is not None
            and not gradient.requires_grad
            and gradient.layout is torch.strided
            and (gradient.shape, gradient.dtype) == self._gradients.like[index]
            and reducer.ready(index)
        ):  # if not, the step launches the bucket
            self._gradients.launch_ready(weight)
            self._call_at_end()
        return False

    def _call_at_end(self) -> None:
        """Have torch call `at_end` at the end of this backward pass."""
        if not self._waits_for_end:
            self._waits_for_end = True
            torch.autograd.Variable._execution_engine.queue_callback(self.at_end)

    def at_end(self) -> None:
        """Finish a backward pass: teach the loop profile, or let the current stream wait for the launched buckets."""
        self._waits_for_end = False
        if self.profile.learning:
            self.profile.pass_over(TorchGradientState(self._gradients.now()))
        elif self._gradients.reducer is not None:
            self._gradients.reducer.wait()  # a program that reads gradients now sees combined ones
