"""`Tail`: what the ranks say to each other with their gradients on a device. The host need not read it.

::

    with the first bucket:  ├ weight ┤                            the device divides the sums of all buckets by its sum
    with the last bucket:   ├ used? of each gradient ┼ `tail_words` of the header ┤

The tail says what the headers say in host memory (`hvdlite.gradients.header`). Only a rank that cannot know the answer by
itself reads the sum of the tails, and then waits for it. A tail with each bucket would cost as much as a bucket of some hundred
kilobytes, for the time of a small message is that of its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.gradients.header import TAIL_WORDS, Header, HeaderSum, read_tail, state_words, tail_words
from hvdlite.protocols import Device

_WEIGHT, _STATE = -TAIL_WORDS, -4


class Tail:
    """The tail of one rank, in memory of a device.

    Args:
        device: The device.
        count: The number of gradients.
        together: Whether the weight travels in the tail, because the first bucket is the last one too.

    Attributes:
        memory: What travels with the last bucket, shape ``(count + TAIL_WORDS,)``, float64.
        first: What travels with the first bucket: the weight, shape ``(1,)``, float64; None if it is in `memory`.
        weight: Shape ``()``: this rank's weight; after the exchange of the first bucket the sum of the weights of all ranks.
    """

    def __init__(self, device: Device, count: int, together: bool) -> None:
        self._device = device
        self.memory = device.zeros([count + TAIL_WORDS], "float64")
        self.first = None if together else device.zeros([1], "float64")
        self.weight = self.memory[_WEIGHT] if self.first is None else self.first[0]
        self._all_used = (True,) * count
        self._usual = device.zeros([count + TAIL_WORDS], "float64")
        self._write(self._usual, self._all_used, Header())
        self._usual_state = 0

    def say_weight(self, weight: float) -> None:
        """Write what travels with the first bucket, on the current stream."""
        if self.first is not None:
            self._device.fill(self.first, weight)

    def say(self, used: tuple[bool, ...], said: Header) -> None:
        """Write what travels with the last bucket, on the current stream.

        Args:
            used: For each gradient, whether this rank has it.
            said: What else this rank says.
        """
        if used != self._all_used or said.joined or said.again:
            self._write(self.memory, used, said)
            return
        if said.state != self._usual_state:
            self._usual_state = said.state
            for number, value in enumerate(state_words(said.state), _STATE):
                self._device.fill(self._usual[number], value)  # a copy from the host might wait
        self._device.copy(self._usual, self.memory)
        if said.weight != 1.0:
            self._device.fill(self.memory[_WEIGHT], said.weight)

    def _write(self, tail: Any, used: Sequence[bool], said: Header) -> None:
        self._device.from_host(np.array([*used, *tail_words(said)], np.float64), tail)

    def read(self) -> HeaderSum:
        """Return the sum of the tails of all ranks, for which the current stream has waited. The host waits."""
        return read_tail(self._device.to_host(self.memory).tolist())
