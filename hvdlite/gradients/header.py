"""`Header`: what the ranks tell each other with their gradients, in a few numbers that are summed over the ranks.

A header has a number for each tensor of a bucket (whether this rank has a gradient of it), and then the words of `Header`.
Nothing else is sent in a step, so a rank says here whatever all ranks must know at once.

Some numbers must be the same on all ranks. The sum shows that, too: see `hvdlite.gradients.same_number`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from hvdlite.errors import HvdliteError
from hvdlite.gradients.same_number import are_equal, with_square

WORDS = 15
"""The number of words that `words` returns."""

TAIL_WORDS = 7
"""The number of words that `tail_words` returns."""

_HALF = 2**16


class Header(NamedTuple):
    """What a rank says to the other ranks with its gradients.

    Attributes:
        weight: The number of samples that the rank's gradients are the mean of.
        again: Whether gradients that the rank has sent early have changed since. In host memory, all ranks then repeat their
            exchanges. On a device, where no rank waits for an answer, the step has failed.
        news: Whether all ranks must put this exchange off. Gradients stay as they are.
        joined: Whether the rank has run out of data.
        weighted: Whether the program has set the weight; None if this is not to be compared.
        state: The `digest` of what must be the same on all ranks.
        passes: The number of backward passes that have added to the rank's gradients; 0 if the number is not known.
    """

    weight: float = 1.0
    again: bool = False
    news: bool = False
    joined: bool = False
    weighted: bool | None = None
    state: int = 0
    passes: int = 0


class HeaderSum(NamedTuple):
    """The sum of the headers of all ranks.

    Attributes:
        anywhere: For each tensor of the bucket, whether any rank has a gradient of it.
        divisor: The sum of the weights.
        again: Whether gradients of some rank have changed after they were sent early.
        news: Whether some rank has put the exchange off, so that nothing was exchanged.
        joined: The number of ranks that have run out of data.
        odd_weights: Whether a rank has set a weight above 1 and another rank has set none, so that nothing was exchanged.
        odd_states: Whether the ranks have different `state`, so that nothing was exchanged.
        odd_passes: Whether the ranks have made different numbers of backward passes.
    """

    anywhere: list[bool]
    divisor: float
    again: bool = False
    news: bool = False
    joined: int = 0
    odd_weights: bool = False
    odd_states: bool = False
    odd_passes: bool = False

    @property
    def stopped(self) -> bool:
        """Whether nothing was exchanged."""
        return self.news or self.odd_weights or self.odd_states


def digest(*values: object) -> int:
    """Return a number below 2^32 for the texts of `values`. Equal values have the same number; others nearly never have."""
    return zlib.crc32(repr(values).encode())


def words(said: Header) -> tuple[float, ...]:
    """Return the words that a rank puts into its header after the tensors."""
    weight, again, news, joined, weighted, state, passes = said
    passes = min(passes, _HALF - 1)
    return (
        weight,
        abs(weight - 1.0),
        again,
        news,
        joined,
        weighted is True and weight > 1.0,
        weighted is False and not joined,
        not joined,
        *state_words(state),
        passes > 0,
        *with_square(passes),
    )


def tail_words(said: Header) -> tuple[float, ...]:
    """Return the words for a header that travels on a device: only the words that are read there."""
    return said.weight, said.again, said.joined, *state_words(said.state)


def read_tail(tail: Sequence[float]) -> HeaderSum:
    """Return the sum of the headers that have travelled on a device.

    Args:
        tail: For each tensor, how many ranks have a gradient of it; then the sum of the `tail_words` of all ranks.
    """
    *sums, weight, again, joined, _, _, _, _ = tail
    return HeaderSum([each > 0 for each in sums], weight, again=again > 0, joined=round(joined))


def check_divisor(average: bool, divisor: float, anywhere: bool) -> None:
    """Raise if gradients are to be averaged and no rank has a weight.

    Args:
        average: Whether the sum of the gradients is divided by `divisor`.
        divisor: The sum of the weights of all ranks.
        anywhere: Whether some rank has a gradient.

    Raises:
        HvdliteError: The weights of all ranks are 0, so there is no average.
    """
    if average and divisor <= 0 and anywhere:
        raise HvdliteError(
            "the weights of all ranks add up to 0, so their gradients have no average: skip this step on all ranks."
        )


def state_words(state: int) -> tuple[int, int, int, int]:
    """Return the words of a `digest`."""
    high, low = divmod(state, _HALF)
    return *with_square(high), *with_square(low)


def are_odd(active: float, summed: Sequence[float]) -> bool:
    """Return whether ranks have sent different digests.

    Args:
        active: The number of ranks that have sent one.
        summed: The sum of their `state_words`.
    """
    high, highs, low, lows = summed
    return not (are_equal(active, high, highs) and are_equal(active, low, lows))


def read(anywhere: list[bool], total: Sequence[float]) -> HeaderSum:
    """Return the sum of the headers of all ranks.

    Args:
        anywhere: For each tensor, whether any rank has a gradient of it.
        total: The sum of the `words` of all ranks.
    """
    weight, _, again, news, joined, weighted, unweighted, active, *state, ranks, passes, squares = total
    return HeaderSum(
        anywhere,
        weight,
        again > 0,
        news > 0,
        int(joined),
        weighted > 0 and unweighted > 0,
        are_odd(active, state),
        not are_equal(ranks, passes, squares),
    )
