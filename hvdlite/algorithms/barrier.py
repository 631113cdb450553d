"""Barrier by dissemination."""

from __future__ import annotations

import numpy as np

from hvdlite.protocols import Transport


def dissemination_barrier(transport: Transport) -> None:
    """Return when every rank has called this function.

    In step k each rank sends an empty message to the rank 2ᵏ to its right. After the step it knows,
    directly or not, that the 2ᵏ⁺¹ - 1 ranks to its left have called. P need not be a power of two.

    Cost for P ranks: ⌈lg P⌉α.

    Source: Hensgen, Finkel & Manber, "Two algorithms for barrier synchronization",
    Int. J. Parallel Program. 17(1), 1988.
    """
    rank, size = transport.rank, transport.size
    outgoing, incoming = np.empty(0, np.uint8), np.empty(0, np.uint8)
    distance = 1
    while distance < size:
        transport.sendrecv(outgoing, (rank + distance) % size, incoming, (rank - distance) % size)
        distance *= 2
