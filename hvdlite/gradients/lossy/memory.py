"""What an aggregator remembers: what a rank has not sent of its gradients yet, and how many steps it has made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.errors import MismatchError
from hvdlite.gradients.same_number import are_equal, with_square
from hvdlite.protocols import Array, ReduceOp


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


class ExactSteps:
    """The steps of one aggregator. All ranks count alike.

    Args:
        name: The name of the aggregator, for errors.
        exact: How many steps at the beginning send whole gradients.

    Attributes:
        made: The number of steps that have begun.
    """

    def __init__(self, name: str, exact: int) -> None:
        self._name, self._exact, self.made = name, exact, 0
        self._are_agreed = False

    def begin(self, collectives: HierarchicalCollectives) -> bool:
        """Count a step, and return whether it sends whole gradients. All ranks call this.

        The ranks compare their counts in the first step, and in the first one after a state was loaded: with other counts they
        would call different operations.

        Raises:
            MismatchError: The ranks go on from different states. Raised on all ranks.
        """
        if self._exact and not self._are_agreed:
            told = np.array(with_square(self.made), np.float64)
            collectives.allreduce(told, ReduceOp.SUM)
            if not are_equal(collectives.size, *told.tolist()):
                raise self.mismatch()
            self._are_agreed = True
        self.made += 1
        return self.made <= self._exact

    def load(self, made: int) -> None:
        """Go on after so many steps."""
        self.made, self._are_agreed = int(made), False

    def mismatch(self) -> MismatchError:
        """Return the error for ranks that go on from different states."""
        return MismatchError(
            f"the ranks go on with {self._name} from different states. Load the state of each rank on that rank, or give all "
            "ranks one: by hvd.broadcast_optimizer_state(optimizer, root_rank) of hvdlite_torch, or by "
            f"{self._name}.load_state_dict(hvd.broadcast_object({self._name}.state_dict(), root_rank))."
        )
