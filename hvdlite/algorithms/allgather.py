"""Allgather around a ring."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.algorithms.slices import slices
from hvdlite.protocols import Array, Transport


def ring_allgather(transport: Transport, data: Array, counts: Sequence[int]) -> None:
    """Copy slice r of `data` from rank r to all ranks, in place.

    In the first step a rank sends its own slice to its right neighbour. In each later step it sends the slice that it received
    in the step before.

    Cost for P ranks and n bytes in all: (P-1)α + (P-1)/P·nβ, the least that any algorithm can send.

    Args:
        transport: The ranks.
        data: Shape ``(sum(counts),)``, with the rank's own part already in slice `rank`.
        counts: The number of elements in each rank's slice, the same on all ranks.
    """
    rank, size = transport.rank, transport.size
    parts = [data[s] for s in slices(counts)]
    for step in range(size - 1):
        transport.sendrecv(
            parts[(rank - step) % size], (rank + 1) % size, parts[(rank - step - 1) % size], (rank - 1) % size
        )
