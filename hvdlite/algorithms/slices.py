"""Cuts a vector into one slice per rank, and checks that the slices of the ranks fit together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.errors import MismatchError
from hvdlite.protocols import Array


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


def check_counts(table: Array) -> int:
    """Return the largest number of elements that travel from one rank to another one.

    Args:
        table: For each rank the numbers of elements that it sends to every rank, and that it expects from every rank: int64,
            shape ``(ranks, 2, ranks)``.

    Raises:
        MismatchError: They do not fit together.
    """
    sent, expected = table[:, 0], table[:, 1]
    for source, dest in np.argwhere(sent != expected.T)[:1]:
        raise MismatchError(
            f"all_to_all: rank {source} of the group sends {sent[source, dest]} elements to rank {dest}, which expects "
            f"{expected[dest, source]} from it. What rank r sends to rank s must be what rank s expects from rank r."
        )
    return int(np.where(np.eye(len(table), dtype=bool), 0, sent).max())
