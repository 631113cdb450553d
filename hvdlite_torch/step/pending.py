"""`PendingStep`: the record of one program's calls for the next step, on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

import hvdlite
from hvdlite import ReduceOp
from hvdlite.errors import ArgumentError


class PendingStep:
    """The record of the program's calls for the next step of one optimizer, on one rank.

    Args:
        allowed: The largest number of backward passes before a step; 1 for any number.

    Attributes:
        allowed: The largest number of backward passes before a step; 1 for any number. A program may change it.
        counts_all: Whether the backward passes of all parameters are counted, and not only those of some.
        weight: The number of samples in this rank's batch.
        combined: Whether the gradients are combined already, so that the step must not combine them again.
        left_out: Whether the program makes steps without combining (`skip_synchronize`).
        quiet: Whether backward passes are not the last ones before the step (`no_sync`).
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.counts_all = allowed > 1
        self.weight = BatchWeight()
        self.combined = False
        self.left_out = False
        self.quiet = False
        self._passes: dict[int, int] = {}

    @property
    def passes(self) -> int:
        """The number of backward passes since gradients were last combined: the largest of all parameters."""
        return max(self._passes.values(), default=0)

    def count_pass(self, parameter: torch.Tensor) -> None:
        """Count a backward pass that has added to the gradient of a parameter.

        Raises:
            ArgumentError: There was one more pass than is allowed.
        """
        # A GradScaler leaves steps out after synchronize(). The next step must combine its gradients all the same.
        self.combined = False
        key = id(parameter)
        passes = self._passes[key] = self._passes.get(key, 0) + 1
        if passes > self.allowed > 1:
            raise ArgumentError(
                f"{passes} backward passes without a step, and backward_passes_per_step={self.allowed}: raise "
                "that number, or leave it out, which allows any."
            )

    def has_combined(self) -> None:
        """Note that the gradients have been combined."""
        self.combined = True
        self._passes.clear()

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Return a context manager: steps in its body do not combine gradients."""
        self.left_out = True
        try:
            yield
        finally:
            self.left_out = False

    @contextlib.contextmanager
    def being_quiet(self) -> Iterator[None]:
        """Return a context manager: backward passes in its body are not the last ones before a step."""
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False


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
