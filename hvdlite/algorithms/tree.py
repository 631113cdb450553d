"""Tree allreduce."""

from __future__ import annotations

from hvdlite.algorithms.broadcast import binomial_broadcast
from hvdlite.algorithms.reduce import binomial_reduce
from hvdlite.protocols import Array, Combine, Transport


def tree(transport: Transport, data: Array, combine: Combine) -> None:
    """Reduce `data` over the ranks, in place: a reduce to rank 0 and a broadcast from it, on a binomial tree.

    There are few messages in all, 2(P-1), and few partners for each rank. But most ranks are
    idle in most steps, and every message is the whole vector.

    Cost for P ranks and n bytes: 2⌈lg P⌉(α + nβ) + ⌈lg P⌉nγ.

    Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
    MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005.
    """
    binomial_reduce(transport, data, 0, combine)
    binomial_broadcast(transport, data, 0)
