"""Reduce to one rank along a binomial tree."""

from __future__ import annotations

import numpy as np

from hvdlite.protocols import Array, Combine, Transport


def binomial_reduce(transport: Transport, data: Array, root: int, combine: Combine) -> None:
    """Reduce `data` over the ranks, in place on rank `root`; on other ranks `data` ends as a partial result.

    In step k the ranks whose distance from the root is an odd multiple of 2ᵏ send their partial result
    to the rank 2ᵏ nearer to the root, and are done.

    Cost for P ranks and n bytes: ⌈lg P⌉(α + nβ + nγ).

    Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
    MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005.
    """
    # Time runs down, eight ranks, root 0:
    #
    #   0   1   2   3   4   5   6   7
    #   │←──┘   │←──┘   │←──┘   │←──┘
    #   │←──────┘       │←──────┘
    #   │←──────────────┘
    size = transport.size
    position = (transport.rank - root) % size
    incoming: Array | None = None
    distance = 1
    while distance < size:
        if position & distance:
            transport.send(data, (position - distance + root) % size)
            return
        if position + distance < size:
            if incoming is None:
                incoming = np.empty_like(data)
            transport.recv(incoming, (position + distance + root) % size)
            combine(data, incoming)
        distance *= 2
