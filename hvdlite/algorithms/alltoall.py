"""All-to-all exchange in pairs."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.algorithms.slices import slices
from hvdlite.protocols import Array, Transport


def pairwise_alltoall(
    transport: Transport, data: Array, send_counts: Sequence[int], out: Array, recv_counts: Sequence[int]
) -> None:
    """Send slice r of `data` to rank r, and receive slice r of `out` from rank r.

    In step s every rank sends to the rank s to its right and receives from the rank s to its left, so
    no two ranks send to the same rank at once.

    Cost for P ranks and n bytes per pair of ranks: (P-1)(α + nβ).

    Args:
        transport: The transport over the ranks.
        data: The values to send: shape ``(sum(send_counts),)``, any dtype.
        send_counts: The number of elements for each rank.
        out: The result: shape ``(sum(recv_counts),)``, the dtype of `data`. It must not overlap `data`.
        recv_counts: The number of elements from each rank.

    Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
    MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005 (pairwise exchange).
    """
    rank, size = transport.rank, transport.size
    outgoing = [data[s] for s in slices(send_counts)]
    incoming = [out[s] for s in slices(recv_counts)]
    incoming[rank][...] = outgoing[rank]
    for step in range(1, size):
        dest, source = (rank + step) % size, (rank - step) % size
        transport.sendrecv(outgoing[dest], dest, incoming[source], source)
