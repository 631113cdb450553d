"""`Errors`: what a rank has not sent of its gradients yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hvdlite.protocols import Array


class Errors:
    """The error memory of one rank. What is not sent in a step is added to the next gradient, so nothing is lost.

    A step in which some value is not finite (an overflow, of which mixed precision makes some) must leave the memory as it is.
    Otherwise no later gradient would be finite.

    Error feedback: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., arXiv:1901.09847.
    """

    def __init__(self) -> None:
        self._of: dict[int, Array] = {}

    def add_to(self, number: int, gradient: Array) -> None:
        """Add what was not sent of a parameter to its next gradient, in place.

        Args:
            number: The number of the parameter.
            gradient: The gradient, of any shape, the same each time.
        """
        if number in self._of:
            gradient += self._of[number]

    def keep(self, number: int, left: Array) -> None:
        """Remember what is left of a gradient, which the caller does not change afterwards."""
        self._of[number] = left

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Give the memory the new numbers of the parameters; forget those that have none."""
        self._of = {numbers[number]: left for number, left in self._of.items() if number in numbers}

    def state(self) -> dict[int, Array]:
        """Return a copy of the memory: for the number of each parameter an array in its shape."""
        return {number: left.copy() for number, left in self._of.items()}

    def load(self, state: Mapping[int, Any]) -> None:
        """Take over a memory that `state` has returned."""
        self._of = {int(number): np.array(left) for number, left in state.items()}


def make_unusable(gradients: Iterable[Array]) -> None:
    """Let all elements be NaN, because no aggregator can combine these gradients: some rank has one that is not finite."""
    for gradient in gradients:
        gradient[...] = np.nan
