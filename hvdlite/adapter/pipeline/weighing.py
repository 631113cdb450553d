"""`Weighing`: the loss of a batch from those of its micro-batches, and the share of each in the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hvdlite.errors import ArgumentError


class Counted(NamedTuple):
    """The loss of some samples.

    Attributes:
        loss: The loss: a sum, or a mean.
        divisor: What its mean is over: samples, tokens, the sum of weights. 0 if there is nothing that counts.
        is_sum: Whether it is a sum, which is still to be divided by that.
    """

    loss: float
    divisor: float
    is_sum: bool = False

    @property
    def total(self) -> float:
        """The sum over everything that counts."""
        return self.loss if self.is_sum else self.loss * self.divisor if self.divisor else 0.0


class Weighing:
    """The losses of one step, of which each may count differently. The loss of the batch is sum / count over all of them.

    A backward pass may come before the forward pass of a later micro-batch. Then it is divided by what the batch is expected to
    count, and `correction` tells afterwards by which factor all gradients are wrong.

    Args:
        parts: The number of micro-batches.
        known: What the batch counts, if that is known before.
    """

    def __init__(self, parts: int, known: float | None = None) -> None:
        self._parts, self._divisor = parts, known
        self._all: list[Counted] = []

    def add(self, counted: Counted) -> None:
        """Add the loss of the next micro-batch."""
        self._all.append(counted)

    @property
    def count(self) -> float:
        """What the micro-batches so far count."""
        return math.fsum(each.divisor for each in self._all)

    def share(self, part: int) -> float:
        """Return the factor of the loss of a micro-batch in the loss of the batch."""
        if not self._divisor:  # what they have counted so far, and as much for each of the others
            self._divisor = self.count * self._parts / len(self._all)
        each = self._all[part]
        return (1.0 if each.is_sum else each.divisor) / self._divisor if self._divisor else 0.0

    @property
    def loss(self) -> float:
        """The loss of the batch, once all micro-batches are there; NaN if nothing counts, as a mean over nothing is."""
        return math.fsum(each.total for each in self._all) / self.count if self.count else math.nan

    @property
    def correction(self) -> float:
        """The factor for all gradients, once all micro-batches are there."""
        if not self._divisor or not self.count or math.isclose(self._divisor, self.count, rel_tol=1e-12):
            return 1.0
        return self._divisor / self.count


def check_mean(whole: Counted, parts: Sequence[Counted], tolerance: float, what: str, advice: str) -> None:
    """Check a loss: that of some samples must follow from those of two parts of them.

    Args:
        whole: The loss of the samples.
        parts: Those of the parts.
        tolerance: The relative error that rounding may have.
        what: What the loss is expected to be a mean over.
        advice: What else the program can do.

    Raises:
        ArgumentError: It does not.
    """
    values = [part.total for part in parts]
    expected = math.fsum(values) / count if (count := math.fsum(part.divisor for part in parts)) else math.nan
    found = whole.total / whole.divisor if whole.divisor else math.nan
    size = max(map(abs, (found, *(part.loss for part in parts if part.divisor))), default=0.0)
    if not math.isfinite(expected + found) or abs(expected - found) <= tolerance * size:
        return
    adds_up = abs(math.fsum(part.loss for part in parts) - whole.loss) <= tolerance * size
    how = "it is their sum" if adds_up else "it is neither their mean nor their sum: it divides by something else"
    raise ArgumentError(
        f"the loss is no mean over {what}: it is {whole.loss:g} for a micro-batch and "
        f"{' and '.join(f'{part.loss:g}' for part in parts)} for the halves of it, so {how}. The loss of a batch could not be "
        f"told from those of its micro-batches. {advice}"
    )
