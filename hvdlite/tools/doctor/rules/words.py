"""Facts in groups, and in words."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from hvdlite.errors import ranks_text
from hvdlite.tools.doctor.facts import HostFacts, MpiFacts, RankFacts

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

GIB, MIB = 2**30, 2**20


def by(facts: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the facts in groups with equal keys."""
    found: dict[K, list[T]] = {}
    for each in facts:
        found.setdefault(key(each), []).append(each)
    return found


def where(members: Sequence[HostFacts | MpiFacts | RankFacts]) -> str:
    """Return which ranks these are, and on which hosts."""
    known = [each.rank for each in members if each.rank is not None]
    names = ", ".join(dict.fromkeys(each.host for each in members))
    return f"{ranks_text(known)} on {names}" if known else names


def count_text(here: Sequence[HostFacts]) -> str:
    return f"{len(here)} rank{'s' * (len(here) > 1)}"


def cores_text(cores: Iterable[int]) -> str:
    numbers = sorted(cores)
    return ranks_text(numbers).replace("rank", "core")


def size(nbytes: float) -> str:
    """Return a number of bytes as text."""
    return f"{nbytes / GIB:.3g} GiB" if nbytes >= GIB else f"{nbytes / MIB:.3g} MiB"
