"""Broadcast from one rank along a binomial tree."""

from __future__ import annotations

from hvdlite.protocols import Array, Transport


def binomial_broadcast(transport: Transport, data: Array, root: int) -> None:
    """Overwrite `data` on every rank with the `data` of rank `root`.

    In each step every rank that has the data sends it to a rank that does not, so the number of ranks with the
    data doubles. A rank sends to the farthest rank first, because this rank passes the data on to most others.

    Cost for P ranks and n bytes: ⌈lg P⌉(α + nβ).

    Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
    MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005.
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
