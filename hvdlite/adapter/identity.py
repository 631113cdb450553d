"""`Identity`: what the ranks match their optimizers by.

Optimizers are numbered in the order in which they are made, for each group of ranks apart, and optimizers with the same number
belong together. But a rank may make one more optimizer for itself (it loads a model to evaluate it), and then its numbers
differ. So `fit` lets the ranks agree on numbers before its first step. In a program's own loop the ranks agree when all have
joined: they recognize their optimizers by the exchanges that they made together::

    rank 0 made 1, 2 and trains 2 ┐                ┌ fit: both train 3, and count on from there
    rank 1 made 1    and trains 1 ┴─▶ they agree ──┴ join, which rank 0 called last: both train 2

An exchange has a key that no other one of the group has, on all ranks alike. Ranks whose optimizers have exchanged something
before say its key in each exchange, so two optimizers of equal layout cannot be taken for each other.

A world that begins after `shutdown` knows no optimizers. An older optimizer gets a number there when it is first used.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

from hvdlite.adapter.advice import say_rates
from hvdlite.adapter.few_bytes.local_steps import Rounds
from hvdlite.api import allgather_object, world
from hvdlite.errors import ArgumentError, MismatchError
from hvdlite.operations.negotiation.mismatch import compare_settings
from hvdlite.ranks.process_set import ProcessSet
from hvdlite.runtime.group import Group


class Numbers:
    """The numbers of the optimizers of one group of ranks, on one rank.

    Attributes:
        next: The number of the next optimizer.
        known: Those that this rank takes first, because other ranks have them: it has joined before it went on with its first
            optimizer of an earlier world.
        taken: The identities that have a number.
    """

    def __init__(self) -> None:
        self.next = 1
        self.known: list[int] = []
        self.taken: weakref.WeakSet[Identity] = weakref.WeakSet()

    def take(self, identity: Identity) -> int:
        self.taken.add(identity)
        if self.known:
            return self.known.pop(0)
        self.next += 1
        return self.next - 1


_numbers: weakref.WeakKeyDictionary[Group, Numbers] = weakref.WeakKeyDictionary()


def numbers_in(group: Group) -> Numbers:
    """Return the numbers of the optimizers of a group."""
    return _numbers.setdefault(group, Numbers())


class Trained(Protocol):
    """The part of an optimizer that `Registry.catch_up` needs."""

    def hvdlite_variables(self) -> list[Any]:
        """Return the framework's variables that are equal on all ranks: the model's trainable ones and the optimizer's."""
        ...

    def hvdlite_passes(self) -> int | None:
        """Return how many backward passes the optimizer has had; None while its variables have no values."""
        ...

    def hvdlite_settle(self, passes: Sequence[int], root: int) -> None:
        """Let what each rank has added up for the next step count, after some have missed passes. Every rank calls this.

        Args:
            passes: What `hvdlite_passes` returned on each rank.
            root: The rank, by its number, whose variables all ranks have now.
        """
        ...

    def hvdlite_rounds(self) -> Rounds | None:
        """Return the rounds of an optimizer whose ranks have states of their own; None if all ranks have the same state."""
        ...


class Identity:
    """The identity of one optimizer, by which the ranks know it.

    Args:
        process_set: The ranks that take part; all if None. This rank may not be one of them, and then does not use it.

    Attributes:
        number: The number of the optimizer: the next number of this rank, until the ranks agree on another one; 0 before its
            first use if its process set was not in effect when it was made.
        rates: A function that returns the present learning rates of the optimizer; empty if it is too slow to get them.
        settings: Lines with the class of the optimizer and its settings, which are compared in the first exchange.
        first: A key of the first exchange of the optimizer's gradients, or of another call that all ranks have made for it; the
            same on all ranks, and of no other optimizer. None before that.
        settled: Whether a join has come since the first exchange.
        may_differ: Whether learning rates that differ are told and not raised, until they have been the same once. Programs
            for Horovod make a step to fill the state, and only then give all ranks the state of one rank.
        apart: Whether they differ in this step, and may.
    """

    def __init__(self, process_set: ProcessSet | None) -> None:
        self.rates: Callable[[], tuple[float, ...]] = tuple
        self.settings: list[str] = []
        self.number, self.settled = 0, False
        self.may_differ = self.apart = False
        self.first: Hashable = None
        self._optimizer: Callable[[], Trained | None] = lambda: None
        self._group: Callable[[], Group | None] = lambda: None
        here = world("DistributedOptimizer()")
        with contextlib.suppress(ArgumentError):
            self.enter(here.group(process_set))

    def enter(self, group: Group) -> None:
        """Get a number in this group, if the present number is from another one, such as that of an earlier world."""
        if self._group() is not group:
            self._group = weakref.ref(group)
            self.number, self.first, self.settled = numbers_in(group).take(self), None, False

    @property
    def key(self) -> Hashable:
        """What an exchange says of the optimizer: which one it is, or before its first exchange what its settings are."""
        return self.first or tuple(self.settings)

    @property
    def optimizer(self) -> Trained | None:
        """The optimizer; None if it has been dropped, or has no variables that are broadcast after a join."""
        return self._optimizer()

    @optimizer.setter
    def optimizer(self, optimizer: Trained) -> None:
        """Let a join broadcast the variables of `optimizer`. The optimizer keeps this object alive, and not the reverse."""
        self._optimizer = weakref.ref(optimizer)


def members(group: Group) -> list[Identity]:
    """Return the identities of this rank's optimizers of a group, in the order of their numbers."""
    found = [each for each in list(numbers_in(group).taken) if each._group() is group]
    return sorted(found, key=lambda each: each.number)


def agree(group: Group, identities: Sequence[Identity], process_set: ProcessSet | None) -> None:
    """Give the same numbers to the same optimizers on all ranks. Every rank of the set calls this.

    Args:
        group: The group of the ranks of the set.
        identities: The identities of this rank's optimizers. All ranks pass the same optimizers in the same order.
        process_set: The ranks that participate; all if None.
    """
    for identity in identities:
        identity.enter(group)
    mine = [identity.number for identity in identities]
    numbers = numbers_in(group)
    everybody = allgather_object((numbers.next, mine), "numbers of optimizers", process_set=process_set)
    if all(told == mine for _, told in everybody):
        return
    start = max(count for count, _ in everybody)
    for identity, number in zip(identities, itertools.count(start), strict=False):
        identity.number = number
    numbers.next = start + max(len(told) for _, told in everybody)


def meet(
    identity: Identity,
    rates: tuple[float, ...],
    gather: Callable[[Any], list[Any]],
    process_set: ProcessSet | None,
) -> bool:
    """Compare the optimizers with which the ranks make a step. Every rank that has data calls this.

    Args:
        identity: The identity of this rank's optimizer.
        rates: Its present learning rates.
        gather: Returns the objects of all ranks that have data.
        process_set: The ranks that participate; all if None.

    Returns:
        Whether to try again, because some ranks, which had not made an exchange with it, have now learned which optimizer it
        is; or because the learning rates differ, and may.

    Raises:
        MismatchError: The classes or settings differ; or the learning rates, and may not; or the ranks make a step of different
            optimizers.
    """
    here = world("the exchange of gradients")
    rank = here.ranks(process_set)[here.engine(process_set).rank]
    everybody = gather((rank, identity.first, rates, identity.settings))
    if all(first is None for _, first, _, _ in everybody):
        compare_settings([each for each, *_ in everybody], [settings for *_, settings in everybody])
    told = {each: (first, given) for each, first, given, _ in everybody}
    rates_of = {each: given for each, (_, given) in told.items()}
    identity.apart = identity.may_differ and len(set(rates_of.values())) > 1
    if not identity.apart:
        check_rates("in this step", rates_of)
    elif here.config.advice and rank == min(rates_of):
        say_rates(rates_text(rates_of))
    known = {first: each for each, (first, _) in told.items() if first is not None}
    if len(known) > 1:
        some, others, *_ = sorted(known.values())
        raise MismatchError(
            f"rank {some} and rank {others} make a step of different optimizers, which have variables of equal shapes. Step "
            "the optimizers of a program in the same order on all ranks, and in one thread; threads that train at the same "
            "time need a process set each."
        )
    learns = any(first is None for first, _ in told.values())
    identity.first = next(iter(known), None)
    return identity.apart or (bool(known) and learns)


def check_rates(when: str, rates: Mapping[int, tuple[float, ...]]) -> None:
    """Raise unless the learning rates are the same on all ranks.

    Args:
        when: The time of the comparison, for the text of the error, such as "in this step".
        rates: The learning rates of each rank, by rank.

    Raises:
        MismatchError: The learning rates differ.
    """
    if len(set(rates.values())) > 1:
        told = rates_text(rates)
        raise MismatchError(
            f"{when} the learning rates of the ranks differ: {told}. A callback or the program has changed them by what only "
            "its own rank knows: let it use the metrics of all ranks (put it after hvd.callbacks.Distributed()), or numbers "
            "that are the same on all of them."
        )


def rates_text(rates: Mapping[int, tuple[float, ...]]) -> str:
    """Write the learning rates of each rank in words."""
    return ", ".join(f"{' and '.join(format(rate, 'g') for rate in own)} on rank {rank}" for rank, own in rates.items())
