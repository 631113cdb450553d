"""Which rows of a tensor belong to which rank, for the gradients of allgather and reducescatter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.adapter.arguments import rank_in, size_of
from hvdlite.api import allgather
from hvdlite.errors import ArgumentError
from hvdlite.operations.reducescatter import split_rows
from hvdlite.ranks.process_set import ProcessSet


def starts_of_own_rows(
    lengths: Sequence[int],
    totals: Sequence[int],
    process_set: ProcessSet | None,
    gradient: str,
    name: str | None = None,
) -> list[int]:
    """Return where this rank's rows begin in gathered tensors. Every rank calls this.

    Args:
        lengths: The number of rows that this rank has given to each tensor.
        totals: The number of rows of each tensor.
        process_set: The ranks that participate; all if None.
        gradient: The name of the gradient in the text of the error.
        name: The name of the exchange; None if the ranks match it by its order.

    Returns:
        The index of this rank's first row in each tensor.

    Raises:
        ArgumentError: A rank that had given rows to the allgather has joined since.
    """
    rank = rank_in(process_set)
    # Each row of the table begins with the number of its rank, because ranks that have joined send no row.
    table = allgather(np.array([[rank, *lengths]], np.int64), name, process_set=process_set)
    if table[:, 1:].sum(0).tolist() != list(totals):
        raise ArgumentError(f"a rank joined between an allgather and its {gradient}: join after the {gradient}.")
    starts: list[int] = table[table[:, 0] < rank, 1:].sum(0).tolist()
    return starts


def rows_of_share(length: int, process_set: ProcessSet | None) -> tuple[int, int]:
    """Return the first row, and the row after the last, of this rank's share of a reducescatter of `length` rows."""
    rank, shares = rank_in(process_set), split_rows(length, size_of(process_set))
    start = sum(shares[:rank])
    return start, start + shares[rank]
