"""How many samples a rank's gradients are the mean of."""

from __future__ import annotations

import hvdlite
from hvdlite import ReduceOp
from hvdlite.errors import ArgumentError


class BatchWeight:
    """The weight of one rank's batch in the next step of one optimizer.

    Attributes:
        value: In samples; 1 unless the program has said it.
        said: The program has said it.
        said_first: The program has said that of the first step.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self.said = False
        self.said_first = False

    def say(self, weight: float, op: ReduceOp) -> None:
        """The program says it.

        Args:
            weight: The number of samples.
            op: How gradients are combined.

        Raises:
            ArgumentError: It is negative, or gradients are not averaged.
        """
        if op is not hvdlite.Average:
            raise ArgumentError(f"a batch weight has no meaning for op={op!r}: it is for averages.")
        if not weight >= 0:
            raise ArgumentError(f"set_batch_weight({weight!r}): expected the number of this rank's samples, 0 or more.")
        self.value, self.said = float(weight), True

    def take(self, first_step: bool) -> float:
        """The weight of the step that is made now. That of the next is to be said anew.

        Args:
            first_step: It is the first one.
        """
        if first_step:
            self.said_first = self.said
        value, self.value, self.said = self.value, 1.0, False
        return value

    def put_back(self, value: float, said: bool) -> None:
        """The batch whose weight was taken is evaluated once more."""
        self.value, self.said = value, said
