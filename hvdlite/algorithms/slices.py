"""Cuts a vector into one slice per rank."""

from __future__ import annotations

from collections.abc import Sequence


def split(length: int, parts: int) -> list[int]:
    """Return the numbers of elements of `parts` nearly equal slices of a vector of `length` elements.

    The first ``length % parts`` slices are one element longer than the others. If there are fewer elements
    than parts, some slices are empty.
    """
    count, longer = divmod(length, parts)
    return [count + 1] * longer + [count] * (parts - longer)


def slices(counts: Sequence[int]) -> list[slice]:
    """Return consecutive slices that hold ``counts[0]``, ``counts[1]``, … elements."""
    result = []
    start = 0
    for count in counts:
        result.append(slice(start, start + count))
        start += count
    return result
