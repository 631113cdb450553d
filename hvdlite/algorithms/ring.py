"""Ring allreduce."""

from __future__ import annotations

from hvdlite.algorithms.allgather import ring_allgather
from hvdlite.algorithms.reduce_scatter import ring_reduce_scatter
from hvdlite.algorithms.slices import slices, split
from hvdlite.protocols import Array, Combine, Transport


def ring(transport: Transport, data: Array, combine: Combine) -> None:
    """Reduce `data` over the ranks, in place: a reduce-scatter and an allgather around a ring.

    No rank ever waits for more than one neighbour. Each rank sends 2(P-1)/P·n bytes, the least possible,
    so this algorithm is the best for long vectors, for any number of ranks. Its 2(P-1) steps make it slow
    for short vectors.

    Cost for P ranks and n bytes: 2(P-1)α + 2(P-1)/P·nβ + (P-1)/P·nγ.

    Source: Patarasu & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    J. Parallel Distrib. Comput. 69(2), 2009.
    """
    counts = split(data.size, transport.size)
    ring_reduce_scatter(transport, data, data[slices(counts)[transport.rank]], counts, combine)
    ring_allgather(transport, data, counts)
