"""Allgather around a ring."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.algorithms.slices import slices
from hvdlite.protocols import Array, Transport


def ring_allgather(transport: Transport, data: Array, counts: Sequence[int]) -> None:
    """Fill every rank's slice of `data` with what that rank has there, in place.

    In each step a rank passes on to its right neighbour the slice that it received in the step
    before, its own slice first.

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
