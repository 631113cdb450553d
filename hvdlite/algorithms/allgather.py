"""Allgather around a ring."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.algorithms.slices import slices
from hvdlite.protocols import Array, Transport


def ring_allgather(transport: Transport, data: Array, counts: Sequence[int]) -> None:
    """Copy each rank's slice of `data` to all ranks, in place.

    In the first step a rank sends its own slice to its right neighbour; in each later step, the slice that it received in the
    step before.

    Cost for P ranks and n bytes in all: (P-1)α + (P-1)/P·nβ, the least that any algorithm can send.

    Args:
        transport: The transport over the ranks.
        data: An array of shape ``(sum(counts),)`` and any dtype. Slice `rank` holds the rank's own values.
        counts: The number of elements in each rank's slice, the same on all ranks.

    Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
    MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005.
    """
    rank, size = transport.rank, transport.size
    parts = [data[s] for s in slices(counts)]
    for step in range(size - 1):
        transport.sendrecv(
            parts[(rank - step) % size], (rank + 1) % size, parts[(rank - step - 1) % size], (rank - 1) % size
        )
