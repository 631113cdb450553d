"""Which optimizer of one rank is which of another's.

Optimizers are numbered as they are made, and the same number is the same optimizer. A rank that makes one more for itself (it
loads a model, to evaluate it) counts on. So `fit` lets the ranks agree before its first step; in a program's own loop they do
so when they have joined, by the exchanges that they made together::

    rank 0 made 1, 2 and trains 2 ┐                ┌ fit: both train 3, and count on from there
    rank 1 made 1    and trains 1 ┴─▶ they agree ──┴ join, of which rank 0 was the last: both train 2
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import hvdlite
from hvdlite import ProcessSet
from hvdlite.world import World

_counts: weakref.WeakKeyDictionary[World, Iterator[int]] = weakref.WeakKeyDictionary()


class Identity:
    """What the ranks know one optimizer by.

    Args:
        here: The world.

    Attributes:
        number: The next of this rank, until ranks agree on another.
        rates: Tells the learning rates that the optimizer has now, where it is not too dear to ask.
        first: The first exchange in which it took part, known by the same name on all ranks; None before.
    """

    def __init__(self, here: World) -> None:
        self.number = next(_counts.setdefault(here, itertools.count(1)))
        self.rates: Callable[[], tuple[float, ...]] = tuple
        self.first: Hashable = None


def agree(here: World, identities: Sequence[Identity], process_set: ProcessSet | None) -> None:
    """Let optimizers have the same numbers on all ranks. Every rank of the set calls this.

    Args:
        here: The world.
        identities: Of this rank's optimizers, those of all ranks in the same order.
        process_set: The ranks that take part; all if None.
    """
    mine = [identity.number for identity in identities]
    everybody = hvdlite.allgather_object(
        (Identity(here).number, mine), "numbers of optimizers", process_set=process_set
    )
    if all(numbers == mine for _, numbers in everybody):
        return
    start = 1 + max(count for count, _ in everybody)
    for identity, number in zip(identities, itertools.count(start), strict=False):
        identity.number = number
    _counts[here] = itertools.count(start + max(len(numbers) for _, numbers in everybody))


def follow(here: World, identities: Iterable[Identity], told: Mapping[Hashable, int]) -> bool:
    """Take the numbers that another rank has given to the same optimizers.

    Args:
        here: The world.
        identities: Of this rank's optimizers.
        told: The other rank's numbers, by their first exchange.

    Returns:
        Whether any was another.
    """
    others = [each for each in identities if told.get(each.first, each.number) != each.number]
    for identity in others:
        identity.number = told[identity.first]
    if others:
        _counts[here] = itertools.count(1 + max(Identity(here).number, *told.values()))
    return bool(others)
