"""Broadcast from one rank along a binomial tree."""

from __future__ import annotations

from hvdlite.protocols import Array, Transport


def binomial_broadcast(transport: Transport, data: Array, root: int) -> None:
    """Overwrite `data` with rank `root`'s.

    Whoever has the data sends it to a rank that has not, so the number of ranks that have it
    doubles in each step. The farthest rank is served first, because it has the most to pass on.

    Cost for P ranks and n bytes: ⌈lg P⌉(α + nβ).
    """
    # Time runs down, eight ranks, root 0 (the tree of `binomial_reduce`, backwards):
    #
    #   0   1   2   3   4   5   6   7
    #   ├──────────────→│
    #   ├──────→│       ├──────→│
    #   ├──→│   ├──→│   ├──→│   ├──→│
    size = transport.size
    position = (transport.rank - root) % size
    distance = 1
    while distance < size and not position & distance:
        distance *= 2
    if position:
        transport.recv(data, (position - distance + root) % size)
    while distance > 1:
        distance //= 2
        if position + distance < size:
            transport.send(data, (position + distance + root) % size)
