"""Which optimizer of one rank is which of another's.

Optimizers are numbered as they are made, and the same number is the same optimizer. A rank that makes one more for itself (it
loads a model, to evaluate it) counts on. So `fit` lets the ranks agree before its first step; in a program's own loop they do
so when they have joined, by the exchanges that they made together::

    rank 0 made 1, 2 and trains 2 ┐                ┌ fit: both train 3, and count on from there
    rank 1 made 1    and trains 1 ┴─▶ they agree ──┴ join, of which rank 0 was the last: both train 2

A world that begins after `shutdown` knows no optimizer. One that was made before gets a number there when it is used first.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from hvdlite.api import allgather_object
from hvdlite.errors import MismatchError
from hvdlite.process_set import ProcessSet
from hvdlite.world import World

_counts: weakref.WeakKeyDictionary[World, Iterator[int]] = weakref.WeakKeyDictionary()


class Trained(Protocol):
    """An optimizer, as `Registry.catch_up` needs it."""

    def hvdlite_variables(self) -> list[Any]:
        """The framework's variables that are alike on all ranks: the model's trainable ones, and the optimizer's."""
        ...

    def hvdlite_passes(self) -> int | None:
        """How many backward passes it has been given; None while its variables have no values."""
        ...


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
        self.rates: Callable[[], tuple[float, ...]] = tuple
        self._optimizer: Callable[[], Trained | None] = lambda: None
        self._count_in(here)

    def _count_in(self, here: World) -> None:
        self._world = weakref.ref(here)
        self.number = next(_counts.setdefault(here, itertools.count(1)))
        self.first: Hashable = None

    def enter(self, here: World) -> None:
        """Be known in this world: with a new number if that was another world's."""
        if self._world() is not here:
            self._count_in(here)

    @property
    def optimizer(self) -> Trained | None:
        """The optimizer; None if it is gone, or has nothing to catch up with after a join."""
        return self._optimizer()

    @optimizer.setter
    def optimizer(self, optimizer: Trained) -> None:
        """Let the variables of `optimizer` be broadcast after a join. The optimizer keeps this object; not the other way."""
        self._optimizer = weakref.ref(optimizer)


def agree(here: World, identities: Sequence[Identity], process_set: ProcessSet | None) -> None:
    """Let optimizers have the same numbers on all ranks. Every rank of the set calls this.

    Args:
        here: The world.
        identities: Of this rank's optimizers, those of all ranks in the same order.
        process_set: The ranks that take part; all if None.
    """
    for identity in identities:
        identity.enter(here)
    mine = [identity.number for identity in identities]
    everybody = allgather_object((Identity(here).number, mine), "numbers of optimizers", process_set=process_set)
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


def check_rates(when: str, rates: Mapping[int, tuple[float, ...]]) -> None:
    """Raise unless the learning rates are the same on all ranks.

    Args:
        when: When they were compared, for the message.
        rates: The learning rates of each rank, by rank.

    Raises:
        MismatchError: They differ.
    """
    if len(set(rates.values())) > 1:
        told = ", ".join(
            f"{' and '.join(format(rate, 'g') for rate in own)} on rank {rank}" for rank, own in rates.items()
        )
        raise MismatchError(
            f"{when} the learning rates of the ranks differ: {told}. A callback or the program has changed them by what only "
            "its own rank knows: let it use the metrics of all ranks (put it after hvd.callbacks.Distributed()), or numbers "
            "that are the same on all of them."
        )
