"""What the ranks come to know of each other without waiting: gradients that have changed after they were sent, and states that
are not the same."""

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
    """The error for a step whose gradients were sent before they were what they are; `what` says how that came."""
    return ArgumentError(_LOST.format(what=what))


_NEWS = 6
"""How many numbers of a tail are read: whether gradients are lost, how many ranks have joined, and the states."""


class LateChanges:
    """What the last buckets have said about lost gradients and states, on its way to the host, which does not wait for it.

    Args:
        device: Where the tails are.
        size: The number of ranks.

    Attributes:
        memory: What the communication stream works on.
    """

    def __init__(self, device: Device, size: int) -> None:
        self.memory = device.zeros([_NEWS], "float64")
        self._device, self._size = device, size
        self._mirror = device.mirror(_NEWS)
        self._event: Any = None

    def send(self, tail: Any, stream: Stream) -> None:
        """Begin to read a tail, on `stream`, which is the current one."""
        self._device.add(tail[-_NEWS:][:1], self.memory[:1])  # once lost, for ever
        self._device.copy(tail[1 - _NEWS :], self.memory[1:])
        self._mirror.take(self.memory)
        # That of a graph is never there to be asked.
        self._event = None if self._device.is_capturing() else stream.record()

    def check(self) -> None:
        """Raise if gradients have been lost on any rank, or states differ, as far as that is known.

        Raises:
            ArgumentError: They have been lost.
            MismatchError: States differ.
        """
        if self._event is None or self._device.is_capturing() or not self._event.query():
            return
        lost, joined, *states = self._mirror.values.tolist()
        if lost > 0:
            raise lost_gradients("on another rank, in an earlier step; its error says more")
        if are_odd(self._size - joined, states):
            raise MismatchError(_ODD_STATES)
