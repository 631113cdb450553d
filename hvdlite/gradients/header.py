"""What the ranks tell each other with their gradients: a few numbers that are summed over the ranks.

A header has a number for each tensor of a bucket (whether this rank has a gradient of it), and then the words of `Header`.
Nobody sends anything else in a step, so whatever must be noticed at once is said here.

Some numbers must be the same on all ranks. A sum can tell: n ranks have said the same x if and only if n · Σx² = (Σx)²
(Cauchy-Schwarz). For whole numbers below 2^16 this is exact in float64 for up to two million ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from hvdlite.errors import HvdliteError

WORDS = 15
"""The length of what `words` returns."""

TAIL_WORDS = 7
"""The length of what `tail_words` returns."""

_HALF = 2**16


class Header(NamedTuple):
    """What a rank says to the others with its gradients.

    Attributes:
        weight: Its share in an average: the number of samples that its gradients are the mean of.
        again: What it has sent early has changed since. In host memory it asks all ranks to repeat their exchanges; on a
            device, where no rank waits for an answer, the step has failed.
        news: It asks all ranks to put this exchange off. Gradients stay as they are.
        joined: It has run out of data.
        weighted: Whether the program said the weight, rather than to leave it at 1; None if nobody is to look.
        state: `digest` of what must be the same on all ranks.
        passes: How many backward passes its gradients are from, as far as it knows; 0 if it does not.
    """

    weight: float = 1.0
    again: bool = False
    news: bool = False
    joined: bool = False
    weighted: bool | None = None
    state: int = 0
    passes: int = 0


class HeaderSum(NamedTuple):
    """What ranks have told each other.

    Attributes:
        anywhere: For each tensor of the bucket, whether any rank has a gradient of it.
        divisor: The sum of the weights.
        again: Some rank asks for a repetition; on a device, some rank's gradients have changed after they were sent.
        news: Some rank has to say something first: nothing was exchanged.
        joined: The number of ranks that have run out of data.
        odd_weights: A rank said a weight above 1, and another rank said none: nothing was exchanged.
        odd_states: What must be the same on all ranks is not: nothing was exchanged.
        odd_passes: Ranks have made different numbers of backward passes.
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
        """Nothing was exchanged."""
        return self.news or self.odd_weights or self.odd_states


def digest(*values: object) -> int:
    """A number below 2^32 that stands for `values`, by their texts. Those that are equal have the same; others nearly never."""
    return zlib.crc32(repr(values).encode())


def words(said: Header) -> tuple[float, ...]:
    """What a rank puts into its header after the tensors."""
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
        passes,
        passes * passes,
    )


def tail_words(said: Header) -> tuple[float, ...]:
    """What a rank puts into its header after the tensors where the header travels on a device: no more than is read there."""
    return said.weight, said.again, said.joined, *state_words(said.state)


def read_tail(tail: Sequence[float]) -> HeaderSum:
    """What the ranks have said on a device.

    Args:
        tail: For each tensor, how many ranks have a gradient of it; then the `tail_words` of all ranks, added up.
    """
    *sums, weight, again, joined, _, _, _, _ = tail
    return HeaderSum([each > 0 for each in sums], weight, again=again > 0, joined=round(joined))


def check_divisor(average: bool, divisor: float, anywhere: bool) -> None:
    """Let gradients pass that have an average, if that is wanted.

    Args:
        average: The sum of the gradients is divided by `divisor`.
        divisor: The sum of the weights of all ranks.
        anywhere: Some rank has a gradient.

    Raises:
        HvdliteError: The weights of all ranks are 0, so there is no average.
    """
    if average and divisor <= 0 and anywhere:
        raise HvdliteError(
            "the weights of all ranks add up to 0, so their gradients have no average: skip this step on all ranks."
        )


def state_words(state: int) -> tuple[int, int, int, int]:
    """The words of a `digest`."""
    high, low = divmod(state, _HALF)
    return high, high * high, low, low * low


def are_odd(active: float, summed: Sequence[float]) -> bool:
    """Whether ranks have said different digests.

    Args:
        active: How many have said one.
        summed: Their `state_words`, added up.
    """
    high, highs, low, lows = summed
    return not (_all_equal(active, high, highs) and _all_equal(active, low, lows))


def read(anywhere: list[bool], total: Sequence[float]) -> HeaderSum:
    """What the ranks have said.

    Args:
        anywhere: For each tensor, whether any rank has a gradient of it.
        total: Their `words`, added up.
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
        not _all_equal(ranks, passes, squares),
    )


def _all_equal(count: float, total: float, squares: float) -> bool:
    return int(count) * int(squares) == int(total) ** 2
