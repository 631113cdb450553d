"""`BackwardPasses`: backward passes teach the loop profile in the first steps; later they launch buckets.

Gradients are compared at two moments by versions and norms, without comparing each value. A CUDA graph is replayed without the
host, so steps that cannot be replayed are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.errors import ArgumentError
from hvdlite.gradients.device.loop_profile import LoopProfile
from hvdlite.gradients.planner import LEARNED_STEPS
from hvdlite.protocols import Device
from hvdlite_torch.sync.device_gradients import DeviceGradients
from hvdlite_torch.tensors.device import is_capturing


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


class Capture:
    """Knows which parts of the present step are captured into a CUDA graph.

    Attributes:
        backward: Whether the first backward pass of this step is captured; None before that pass.
    """

    def __init__(self) -> None:
        self.backward: bool | None = None

    def begin_step(self) -> None:
        """Forget the backward pass of the last step."""
        self.backward = None

    def saw_backward(self) -> None:
        """Note whether a backward pass is captured. Only the first one of a step counts."""
        if self.backward is None:
            self.backward = is_capturing()

    def check_step(self, parameters: Sequence[torch.Tensor], weight: float, learning: bool) -> None:
        """Raise ArgumentError unless the present step can be replayed or is not captured.

        Args:
            parameters: The parameters of the optimizer.
            weight: The number of samples of this rank.
            learning: Whether the loop profile is learned in this step, for which the host waits.

        Raises:
            ArgumentError: The step is captured and cannot be replayed. The text says why.
        """
        problem = ""
        if not is_capturing():
            if self.backward:
                problem = (
                    "the backward pass was captured into a CUDA graph, and the step was not: capture optimizer.step() as well. "
                    "Replays run no hooks, so nobody would know where the gradients of the next pass are."
                )
        elif learning:
            problem = (
                f"one of the first {LEARNED_STEPS} steps is captured into a CUDA graph, and the host waits in it: make some "
                "steps before."
            )
        elif weight == 0 or any([parameter.grad is None for parameter in parameters]):
            problem = (
                "a step is captured into a CUDA graph in which this rank has no samples, or lacks the gradient of a parameter, "
                "so that the host would wait in it. Freeze parameters that are not used (requires_grad_(False)) before."
            )
        if problem:
            raise ArgumentError(problem)


class TorchGradientState:
    """The `hvdlite.gradients.device.loop_profile.GradientState` of torch gradients: their state at the moment it is made.

    Args:
        gradients: The gradients of all parameters. This object keeps them alive.
    """

    def __init__(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self._versions = [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]
        # Some changes make no new version: those through p.grad.data, and those of a GradScaler.
        dense = [gradient.detach() for gradient in gradients if gradient is not None and not gradient.is_sparse]
        self._norms = [norm.nan_to_num(0.0) for norm in torch._foreach_norm(dense)] if dense else []

    def is_like(self, other: TorchGradientState) -> bool:
        """Return whether the gradients are the same as in `other`, as far as can be seen. The host may wait for the device."""
        same = all(
            mine is theirs and version == now
            for (mine, version), (theirs, now) in zip(self._versions, other._versions, strict=True)
        )
        return same and all(map(torch.equal, self._norms, other._norms))
