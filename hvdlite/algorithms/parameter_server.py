"""Parameter-server allreduce."""

from __future__ import annotations

import numpy as np

from hvdlite.protocols import Array, Combine, Transport


def parameter_server(transport: Transport, data: Array, combine: Combine) -> None:
    """Reduce `data` over the ranks, in place: rank 0 receives and reduces all vectors, and sends back the result.

    Rank 0 reduces in the order of the ranks. There are two steps only, so this is fast for few ranks and
    short vectors. But all bytes go through one port, so the time grows with the number of ranks.

    Cost for P ranks and n bytes: 2α + 2(P-1)nβ + (P-1)nγ.

    Source: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014
    (here with one synchronous server, which is also a worker).
    """
    #   0 (server)   1       2       3       time runs down
    #   │←───────────┘       │       │
    #   │←───────────────────┘       │
    #   │←───────────────────────────┘
    #   ├───────────→│       │       │
    #   ├───────────────────→│       │
    #   ├───────────────────────────→│
    if transport.rank:
        transport.send(data, 0)
        transport.recv(data, 0)
        return
    workers = range(1, transport.size)
    incoming = np.empty_like(data)
    for worker in workers:
        transport.recv(incoming, worker)
        combine(data, incoming)
    for worker in workers:
        transport.send(data, worker)
