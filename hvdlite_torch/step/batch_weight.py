"""`BatchWeight`: the number of samples in a rank's batch, by which its gradients are weighted."""

from __future__ import annotations

import hvdlite
from hvdlite import ReduceOp
from hvdlite.errors import ArgumentError


class BatchWeight:
    """The weight of one rank's batch in the next step of one optimizer.

    Attributes:
        value: The number of samples; 1.0 unless the program has set it.
        is_set: Whether the program has set the weight of the next step.
        first_was_set: Whether the program had set the weight of the first step.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self.is_set = False
        self.first_was_set = False

    def set(self, weight: float, op: ReduceOp) -> None:
        """Set the weight of the next step.

        Args:
            weight: The number of samples.
            op: How gradients are combined.

        Raises:
            ArgumentError: `weight` is negative, or `op` is not Average.
        """
        if op is not hvdlite.Average:
            raise ArgumentError(f"a batch weight has no meaning for op={op!r}: it is for averages.")
        if not weight >= 0:
            raise ArgumentError(f"set_batch_weight({weight!r}): expected the number of this rank's samples, 0 or more.")
        self.value, self.is_set = float(weight), True

    def take(self, first_step: bool) -> float:
        """Return the weight of the present step, and forget it.

        Args:
            first_step: Whether the present step is the first one.
        """
        if first_step:
            self.first_was_set = self.is_set
        value, self.value, self.is_set = self.value, 1.0, False
        return value

    def put_back(self, value: float, is_set: bool) -> None:
        """Restore the weight that `take` has returned, because a closure evaluates the same batch once more."""
        self.value, self.is_set = value, is_set
