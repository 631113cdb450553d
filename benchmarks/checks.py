"""Checks the result of each peer. A wrong result ends the run, because the figures of that peer are worth nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Relative to the change of the weights by training. Sums in different orders cause far smaller deviations, even after Adam's
# division by small numbers. Training on one rank's batches alone, or without one gradient, causes far larger deviations.
WEIGHT_TOLERANCE = 1e-3


class WrongResult(Exception):
    """A peer has computed a wrong result."""


def addend(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a rank: small whole numbers that differ by rank and by position, and are exact in any dtype."""
    import torch

    return (torch.arange(elements) % 7 + rank + 1).to(dtype)


def true_sum(ranks: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of the addends of ranks 0 … `ranks` - 1, in closed form."""
    import torch

    return (torch.arange(elements) % 7 * ranks + ranks * (ranks + 1) // 2).to(dtype)


def check_sum(peer: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare a sum with the true one, exactly.

    Raises:
        WrongResult: The sums differ.
    """
    import torch

    if not torch.equal(result, expected):
        at = int(torch.nonzero(result != expected)[0])
        raise WrongResult(f"{peer}: element {at} of {len(result)} is {result[at].item()}, not {expected[at].item()}.")


def check_weights(deviations: Mapping[str, float]) -> None:
    """Check that rounding explains the deviations of weights: that none is above `WEIGHT_TOLERANCE`.

    Args:
        deviations: By peer, the distance from the weights of another peer or rank, relative to their change by training.

    Raises:
        WrongResult: A deviation is larger, or is not a number.
    """
    for peer, deviation in deviations.items():
        if not deviation <= WEIGHT_TOLERANCE:
            raise WrongResult(
                f"{peer}: weights are off by {deviation:.2g} of their way; at most {WEIGHT_TOLERANCE:g} is due."
            )
