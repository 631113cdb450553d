"""`ExactSteps`: counts the steps of an aggregator, of which the first ones send whole gradients."""

from __future__ import annotations

import numpy as np

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.errors import MismatchError
from hvdlite.gradients.same_number import are_equal, with_square
from hvdlite.protocols import ReduceOp


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
