"""Reduce-scatter around a ring: rank r ends with slice r of the sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.algorithms.slices import slices
from hvdlite.protocols import Array, Combine, Transport


def ring_reduce_scatter(transport: Transport, data: Array, out: Array, counts: Sequence[int], combine: Combine) -> None:
    """Reduce `data` over the ranks and keep slice `rank` of the result in `out`.

    A partial sum of each slice travels once around the ring, and each rank adds its own values to it.
    Each slice is completed on one rank only, so the ranks cannot get results that differ by rounding.

    Cost for P ranks and n bytes: (P-1)α + (P-1)/P·n(β + γ), the least that any algorithm can send.

    Args:
        transport: The transport over the ranks.
        data: The values to reduce: shape ``(sum(counts),)``. They are only read, unless `out` is a slice of them.
        out: The result: shape ``(counts[rank],)``, the dtype of `data`. It is either slice `rank` of `data`
            itself (in place), or memory that does not overlap `data`.
        counts: The number of elements in each rank's slice, the same on all ranks.
        combine: Reduces two arrays into the first.

    Source: Patarasu & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    J. Parallel Distrib. Comput. 69(2), 2009.
    """
    rank, size = transport.rank, transport.size
    parts = [data[s] for s in slices(counts)]
    if not np.may_share_memory(out, parts[rank]):
        out[...] = parts[rank]
    if size == 1:
        return
    # Three ranks, slices 0 1 2; "1:ab" is slice 1 with the parts of ranks a and b in it.
    #
    #             rank a     rank b     rank c
    #   step 0    sends 2:a  sends 0:b  sends 1:c    to the right: a → b → c → a
    #             has 1:ca   has 2:ab   has 0:bc
    #   step 1    sends 1:ca sends 2:ab sends 0:bc
    #             has 0:bca  has 1:cab  has 2:abc    a has slice 0, b slice 1, c slice 2
    #
    # There are two buffers: one is sent while the other is received.
    longest = max(counts)
    buffers = (np.empty(longest, data.dtype), np.empty(longest, data.dtype))
    outgoing = parts[(rank - 1) % size]
    for step in range(size - 1):
        part = parts[(rank - 2 - step) % size]
        incoming = buffers[step % 2][: part.size]
        transport.sendrecv(outgoing, (rank + 1) % size, incoming, (rank - 1) % size)
        if step < size - 2:
            combine(incoming, part)
        outgoing = incoming
    combine(out, outgoing)
