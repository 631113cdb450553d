"""What the ranks learn about each other without waiting: that gradients have changed after they were sent, and that the states
of the ranks differ."""

from __future__ import annotations

from typing import Any

from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.gradients.header import are_odd
from hvdlite.protocols import Device, Stream

_LOST = (
    "gradients changed after they had been sent to the other ranks: {what}. They are sent during the backward pass that was, "
    "in the first steps, the last one before a step. If there may be more passes than then, run those before the last one "
    "within optimizer.no_sync(), or say the largest number by backward_passes_per_step. To change gradients, or to leave out a "
    "step, call optimizer.synchronize() first. Or pass overlap=False, and nothing is sent before the step."
)

_ODD_STATES = (
    "the learning rates of the ranks were not the same in an earlier step, or a sharded optimizer's state was loaded on some "
    "ranks only, so their parameters have come apart. If a scheduler follows a loss, give it the same number everywhere, such "
    "as hvd.allreduce(loss). After load_state_dict() on one rank: hvd.broadcast_optimizer_state(optimizer, that rank)."
)


def lost_gradients(what: str) -> ArgumentError:
    """Return the error for a step whose gradients have changed after they were sent; `what` says how they have changed."""
    return ArgumentError(_LOST.format(what=what))


_NEWS = 6
"""The number of words of a tail that are read: whether gradients are lost, how many ranks have joined, and the states."""


class LateChanges:
    """Brings to the host what the last buckets say about lost gradients and states. The host does not wait for it.

    Args:
        device: The device of the tails.
        size: The number of ranks.

    Attributes:
        memory: The tensor that the communication stream works on.
    """

    def __init__(self, device: Device, size: int) -> None:
        self.memory = device.zeros([_NEWS], "float64")
        self._device, self._size = device, size
        self._mirror = device.mirror(_NEWS)
        self._event: Any = None

    def send(self, tail: Any, stream: Stream) -> None:
        """Begin to read a tail, on `stream`, which is current."""
        self._device.add(tail[-_NEWS:][:1], self.memory[:1])  # a sum: a loss is never forgotten
        self._device.copy(tail[1 - _NEWS :], self.memory[1:])
        self._mirror.take(self.memory)
        # An event that is captured into a graph cannot be queried.
        self._event = None if self._device.is_capturing() else stream.record()

    def check(self) -> None:
        """Raise if gradients have been lost on any rank, or if states differ, as far as this is known.

        Raises:
            ArgumentError: Gradients have been lost on some rank.
            MismatchError: The states of the ranks differ.
        """
        if self._event is None or self._device.is_capturing() or not self._device.is_over(self._event):
            return
        lost, joined, *states = self._mirror.values.tolist()
        if lost > 0:
            raise lost_gradients("on another rank, in an earlier step; its error says more")
        if are_odd(self._size - joined, states):
            raise MismatchError(_ODD_STATES)
