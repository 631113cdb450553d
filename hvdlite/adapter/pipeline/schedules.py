"""Schedules: the order in which a rank makes the forward and backward passes of micro-batches through its stages.

Stage s is on rank s modulo the number of ranks. All stages make their forward passes in the order of the micro-batches, and
their backward passes in one order too, so that a message is always the next one of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple


class Pass(NamedTuple):
    """A pass of a micro-batch through a stage.

    Attributes:
        forward: Whether it goes forward.
        part: The number of the micro-batch.
        stage: The number of the stage.
    """

    forward: bool
    part: int
    stage: int


Schedule = Callable[[int, int, int, int], Sequence[Pass]]
"""``schedule(place, places, parts, per_rank)``: the passes of the rank `place` of `places`, with `per_rank` stages on each."""


def forward_only(place: int, places: int, parts: int, per_rank: int = 1) -> Sequence[Pass]:
    """Return the forward passes alone, stage by stage."""
    return [Pass(True, part, place + places * number) for number in range(per_rank) for part in range(parts)]


def gpipe(place: int, places: int, parts: int, per_rank: int = 1) -> Sequence[Pass]:
    """Return all forward passes, then all backward passes (GPipe, arXiv:1811.06965)."""
    stages = [place + places * number for number in range(per_rank)]
    backward = [Pass(False, part, stage) for stage in reversed(stages) for part in range(parts)]
    return [*forward_only(place, places, parts, per_rank), *backward]


def there_and_back(place: int, places: int, parts: int, per_rank: int = 1) -> Sequence[Pass]:
    """Return all forward passes, then the backward passes from the last part to the first: the parts are of one sequence."""
    forward = forward_only(place, places, parts, per_rank)
    return [*forward, *(Pass(False, part, stage) for _, part, stage in reversed(forward))]


def one_forward_one_backward(place: int, places: int, parts: int, per_rank: int = 1) -> Sequence[Pass]:
    """Return forward and backward passes in turn, so that few micro-batches are on their way at a time.

    With one stage on each rank this is PipeDream-Flush (arXiv:2006.09503): a stage begins with as many forward passes as there
    are stages after it. With several it is the interleaved schedule (arXiv:2104.04473): micro-batches go through all stages in
    rounds, of as many micro-batches as there are ranks, or a little more.
    """
    rounds = _rounds(parts, places)
    first, last = range(per_rank), range(per_rank - 1, -1, -1)
    forward = [Pass(True, part, place + places * n) for batch in rounds for n in first for part in batch]
    backward = [Pass(False, part, place + places * n) for batch in rounds for n in last for part in batch]
    ahead = places - place - 1 if per_rank == 1 else 2 * (places - place - 1) + (per_rank - 1) * len(rounds[0])
    ahead = min(ahead, len(forward))
    passes = forward[:ahead]
    for number, back in enumerate(backward):
        passes += [*forward[ahead + number : ahead + number + 1], back]
    return passes


def _rounds(parts: int, places: int) -> list[range]:
    """Return the micro-batches in rounds of nearly equal length, each of at least `places` if there are so many."""
    count = max(1, parts // places)
    bounds = [-(-parts * number // count) for number in range(count + 1)]  # the longer ones first
    return [range(a, b) for a, b in pairwise(bounds)]
