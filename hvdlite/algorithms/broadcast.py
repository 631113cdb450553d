"""Broadcast from one rank along a binomial tree."""

from __future__ import annotations

from hvdlite.protocols import Array, Transport


def binomial_broadcast(transport: Transport, data: Array, root: int) -> None:
    """Overwrite `data` with the data of rank `root`.

    In each step every rank that has the data sends it to a rank that does not, so the number of ranks with the data doubles. A
    rank sends to the farthest rank first, because that one has the most to pass on.

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
