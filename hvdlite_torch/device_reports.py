"""Gradients that have changed after they were sent: what is said, and how the other ranks come to know of it."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite.errors import ArgumentError
from hvdlite.protocols import Stream

_LOST = (
    "gradients changed after they had been sent to the other ranks: {what}. They are sent during the backward pass that was, "
    "in the first steps, the last one before a step. If there may be more passes than then, run those before the last one "
    "within optimizer.no_sync(), or say the largest number by backward_passes_per_step. To change gradients, or to leave out a "
    "step, call optimizer.synchronize() first. Or pass overlap=False, and nothing is sent before the step."
)


def lost_gradients(what: str) -> ArgumentError:
    """The error for a step whose gradients were sent before they were what they are; `what` says how that came."""
    return ArgumentError(_LOST.format(what=what))


class Reports:
    """What the last buckets have said about lost gradients, on its way to the host, which does not wait for it.

    Args:
        device: Where the tails are.
    """

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self._host = torch.zeros((), dtype=torch.float64, pin_memory=device.type == "cuda")
        self._seen = self._host.numpy()
        self._event: Any = None

    def send(self, tail: torch.Tensor, stream: Stream) -> None:
        """Begin to read a tail, on `stream`, which is the current one."""
        self.total.add_(tail[-1])
        self._host.copy_(self.total, non_blocking=True)
        self._event = None if is_capturing() else stream.record()  # that of a graph is never there to be asked

    def check(self) -> None:
        """Raise if gradients have been lost on any rank, as far as that is known.

        Raises:
            ArgumentError: They have.
        """
        if self._event is None or is_capturing() or not self._event.query():
            return
        if self._seen[()] > 0:
            raise lost_gradients("on another rank, in an earlier step; its error says more")


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph, so that nothing can be asked about it."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
