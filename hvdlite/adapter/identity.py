"""`Identity`: the number by which the ranks match their optimizers.

Optimizers are numbered in the order in which they are made, and optimizers with the same number belong together. But a rank may
make one more optimizer for itself (it loads a model to evaluate it), and then its numbers differ. So `fit` lets the ranks agree
on numbers before its first step. In a program's own loop the ranks agree when all have joined: they recognize their optimizers
by the exchanges that they made together::

    rank 0 made 1, 2 and trains 2 ┐                ┌ fit: both train 3, and count on from there
    rank 1 made 1    and trains 1 ┴─▶ they agree ──┴ join, which rank 0 called last: both train 2

A world that begins after `shutdown` knows no optimizers. An older optimizer gets a number there when it is first used.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from hvdlite.adapter.few_bytes.local_steps import Rounds
from hvdlite.api import allgather_object
from hvdlite.errors import MismatchError
from hvdlite.process_set import ProcessSet
from hvdlite.world import World

_counts: weakref.WeakKeyDictionary[World, Iterator[int]] = weakref.WeakKeyDictionary()


class Trained(Protocol):
    """The part of an optimizer that `Registry.catch_up` needs."""

    def hvdlite_variables(self) -> list[Any]:
        """Return the framework's variables that are equal on all ranks: the model's trainable ones and the optimizer's."""
        ...

    def hvdlite_passes(self) -> int | None:
        """Return how many backward passes the optimizer has had; None while its variables have no values."""
        ...

    def hvdlite_rounds(self) -> Rounds | None:
        """Return the rounds of an optimizer whose ranks have states of their own; None if all ranks have the same state."""
        ...


class Identity:
    """The identity of one optimizer, by which the ranks know it.

    Args:
        here: The world.

    Attributes:
        number: The number of the optimizer: the next number of this rank, until the ranks agree on another one.
        rates: A function that returns the present learning rates of the optimizer; empty if it is too slow to get them.
        first: A key of the first exchange of the optimizer's gradients, the same on all ranks; None before that exchange.
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
        """Get a number in this world, if the present number is from another world."""
        if self._world() is not here:
            self._count_in(here)

    @property
    def optimizer(self) -> Trained | None:
        """The optimizer; None if it has been dropped, or has no variables that are broadcast after a join."""
        return self._optimizer()

    @optimizer.setter
    def optimizer(self, optimizer: Trained) -> None:
        """Let a join broadcast the variables of `optimizer`. The optimizer keeps this object alive, and not the reverse."""
        self._optimizer = weakref.ref(optimizer)


def agree(here: World, identities: Sequence[Identity], process_set: ProcessSet | None) -> None:
    """Give the same numbers to the same optimizers on all ranks. Every rank of the set calls this.

    Args:
        here: The world.
        identities: The identities of this rank's optimizers. All ranks pass the same optimizers in the same order.
        process_set: The ranks that participate; all if None.
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
    """Take over the numbers that another rank has for the same optimizers.

    Args:
        here: The world.
        identities: The identities of this rank's optimizers.
        told: The numbers of the other rank's optimizers, by `Identity.first`.

    Returns:
        Whether any number has changed.
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
        when: The time of the comparison, for the text of the error, such as "in this step".
        rates: The learning rates of each rank, by rank.

    Raises:
        MismatchError: The learning rates differ.
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
