"""`PendingStep`: the record of one program's calls for the next step, on one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hvdlite.errors import ArgumentError
from hvdlite_torch.step.batch_weight import BatchWeight


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
