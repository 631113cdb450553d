"""`follow`: after a join, the optimizers of each rank have the numbers that those of another rank have.

A rank may have other optimizers than the others, or may have missed the first steps of one::

    rank 0: numbers 1, 2, 3; exchanges with 2, 3 ┐ same exchanges ─▶ 1 of rank 1 is 2 of rank 0
    rank 1: numbers 1, 2;    exchanges with 1    ┘ the only other one that fits ─▶ 2 of rank 1 is 3 of rank 0
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from hvdlite.adapter.identity import Identity, members, numbers_in
from hvdlite.errors import MismatchError, ranks_text
from hvdlite.protocols import TensorInfo
from hvdlite.runtime.group import Group
from hvdlite.tensors.registry import adapter_for


class Known(NamedTuple):
    """What a rank tells the others of one of its optimizers.

    Attributes:
        number, first, settled: See `Identity`.
        infos: Dtype and shape of its variables; None if it has none that are broadcast, or they have no values yet.
        passes: The number of its backward passes; for an optimizer whose ranks have states of their own, since it was made.
        alone: Whether its ranks have states of their own.
    """

    number: int
    first: Hashable
    settled: bool
    infos: tuple[TensorInfo, ...] | None
    passes: int
    alone: bool


def know(identity: Identity) -> Known:
    """Return what this rank tells the others of an optimizer."""
    optimizer = identity.optimizer
    passes = None if optimizer is None else optimizer.hvdlite_passes()
    if optimizer is None or passes is None:
        return Known(identity.number, identity.first, identity.settled, None, 0, False)
    infos = tuple(adapter_for(variable).info(variable) for variable in optimizer.hvdlite_variables())
    return Known(
        identity.number, identity.first, identity.settled, infos, passes, optimizer.hvdlite_rounds() is not None
    )


def tell(group: Group) -> tuple[int, list[Known]]:
    """Return what this rank tells the others of its optimizers: the number of its next one, and those that there are."""
    return numbers_in(group).next, [know(each) for each in members(group)]


def same_as(own: Sequence[Known], others: Sequence[Known], missed: bool, made_alike: bool) -> dict[int, int]:
    """Return which optimizers of a rank are which of another rank's: for numbers of its own, those of the other rank.

    An optimizer with which only the other rank has made exchanges has the same number on both, if those that both know have; if
    not, it must be clear which one it is.

    Args:
        own: The optimizers of the rank, by their numbers.
        others: The optimizers of the other rank, by their numbers.
        missed: Whether the rank has missed exchanges since the last join.
        made_alike: Whether both have made as many optimizers, so that equal numbers mean the same.

    Raises:
        LookupError: It is not clear.
    """
    by_first = {each.first: each.number for each in others if each.first is not None}
    found = {each.number: by_first[each.first] for each in own if each.first in by_first}
    alike = made_alike and all(number == other for number, other in found.items())
    new = {each.number: each for each in own if each.first is None}
    for other in [each for each in others if each.number not in found.values() and not each.settled]:
        candidates = [each for each in new.values() if None in (each.infos, other.infos) or each.infos == other.infos]
        if alike and other.number in new and new[other.number] in candidates:
            number = other.number
        elif other.first is None or not missed or not candidates:
            continue
        else:
            unknown = [each for each in others if each.number not in found.values() and each.first and not each.settled]
            if len([each for each in unknown if each.infos == other.infos]) != len(candidates):
                raise LookupError
            number = candidates[0].number
        found[number] = other.number
        del new[number]
    unknown = [*new.values(), *(each for each in others if each.first is None and each.number not in found.values())]
    if not alike and any(each.passes for each in unknown):  # one has added up gradients, but has made no exchange yet
        raise LookupError
    return found


class Followed(NamedTuple):
    """How the optimizers of a rank go on as those of another one.

    Attributes:
        numbers: The new number of each optimizer of this rank, by its old one.
        together: For each optimizer that all ranks have, what each rank has told of it, by its new number.
    """

    numbers: dict[int, int]
    together: dict[int, list[Known]]


def follow(
    group: Group, identities: Sequence[Identity], everybody: Sequence[tuple[int, Sequence[Known]]], root: int
) -> Followed:
    """Take over the numbers that another rank has for the same optimizers. Every rank calls this.

    Args:
        group: The group of the ranks.
        identities: The identities of this rank's optimizers.
        everybody: For each rank, what `tell` returned there.
        root: The rank whose numbers are taken.

    Raises:
        MismatchError: Some rank does not know which of its optimizers is which of the other's. Raised on all ranks.
    """
    matched, lost = [], []
    for rank, (made, own) in enumerate(everybody):
        try:
            made_alike = made == everybody[root][0]
            matched.append(same_as(own, everybody[root][1], group.missed[rank] > 0, made_alike))
        except LookupError:
            lost.append(group.ranks[rank])
    if lost:
        raise MismatchError(
            f"{ranks_text(lost)} called join() before the first step with an optimizer that rank {group.ranks[root]} trains, "
            "and the ranks have made different optimizers, so nobody knows which one of them it is. Let all ranks make the "
            "same optimizers in the same order; or make a step with each of them before a rank joins."
        )
    firsts = {each.number: each.first for each in everybody[root][1]}
    # An optimizer that the other rank does not know, and whose number it has for another one, gets a number that no rank has.
    most, start = max(len(own) for _, own in everybody), max(following for following, _ in everybody)
    free, renumbered = itertools.count(start + group.rank * most), {}
    for identity in identities:
        before = identity.number
        if before in matched[group.rank]:
            identity.number = matched[group.rank][before]
            identity.first = identity.first or firsts[identity.number]
        elif before in firsts:
            identity.number = next(free)
        renumbered[before] = identity.number
        identity.settled = identity.first is not None
    if everybody[group.rank][0] == 1:
        numbers_in(group).known = [each.number for each in everybody[root][1] if each.first is not None]
    numbers_in(group).next = start + group.size * most
    told: dict[int, list[Known]] = {}
    for same, (_, own) in zip(matched, everybody, strict=True):
        for each in own:
            if each.number in same:
                told.setdefault(same[each.number], []).append(each)
    return Followed(renumbered, {number: known for number, known in sorted(told.items()) if len(known) == group.size})
