"""The step that comes, as far as it has gone on this rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hvdlite.errors import ArgumentError
from hvdlite_torch.step.batch_weight import BatchWeight


class PendingStep:
    """What one rank's program has done, and said, for the next step of one optimizer.

    Args:
        allowed: Backward passes before a step, at most; 1 for any number.

    Attributes:
        allowed: As given; a program may change it.
        counts_all: The backward passes of all parameters are noticed.
        weight: How many samples the gradients are the mean of.
        combined: The gradients are combined already: the step must not combine them once more.
        left_out: The program makes steps without combining (`skip_synchronize`).
        quiet: Backward passes are not the last ones before the step (`no_sync`).
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
        """How many backward passes there have been."""
        return max(self._passes.values(), default=0)

    def count_pass(self, parameter: torch.Tensor) -> None:
        """A backward pass has added to the gradient of a parameter.

        Raises:
            ArgumentError: It is one more than is allowed.
        """
        # A step that was left out after synchronize(), as GradScaler does, must not spare the next one its exchange.
        self.combined = False
        key = id(parameter)
        passes = self._passes[key] = self._passes.get(key, 0) + 1
        if passes > self.allowed > 1:
            raise ArgumentError(
                f"{passes} backward passes without a step, and backward_passes_per_step={self.allowed}: raise "
                "that number, or leave it out, which allows any."
            )

    def has_combined(self) -> None:
        """The gradients have been combined."""
        self.combined = True
        self._passes.clear()

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Steps within the body of a with statement do not combine gradients."""
        self.left_out = True
        try:
            yield
        finally:
            self.left_out = False

    @contextlib.contextmanager
    def being_quiet(self) -> Iterator[None]:
        """Backward passes within the body of a with statement are not the last ones before a step."""
        self.quiet = True
        try:
            yield
        finally:
            self.quiet = False
