"""Rabenseifner's allreduce: recursive halving, then recursive doubling."""

from __future__ import annotations

import numpy as np

from hvdlite.algorithms.fold import Core
from hvdlite.algorithms.slices import split
from hvdlite.protocols import Array, Combine, Transport


def rabenseifner(transport: Transport, data: Array, combine: Combine) -> None:
    """Reduce `data` over the ranks, in place, with a ring's bandwidth in a logarithmic number of steps.

    First comes a reduce-scatter by recursive halving: two partners split the range on which both still work, and
    each sends the half that it does not keep. Then comes an allgather by recursive doubling: the same exchanges in
    the reverse order, with complete values. Each element is completed on one rank only, so all ranks get the same
    bits. If P is not a power of two, the extra ranks are folded in beforehand and out afterwards (`Core`). This
    sends two more whole vectors, so a ring is faster for long vectors.

    Cost for P = 2ᵏ ranks and n bytes: 2kα + 2(P-1)/P·nβ + (P-1)/P·nγ.

    Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; Thakur,
    Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH",
    Int. J. High Perform. Comput. Appl. 19(1), 2005.
    """
    core = Core(transport.size)
    index = core.index(transport.rank)
    scratch = np.empty_like(data)
    core.fold_in(transport, data, scratch, combine)
    if index is not None:
        # Four ranks; each line shows the quarters of the vector that a rank works on:
        #
        #                  rank 0    rank 1    rank 2    rank 3
        #   distance 1     0 1 2 3   0 1 2 3   0 1 2 3   0 1 2 3    0 ↔ 1, 2 ↔ 3 exchange halves
        #   distance 2     0 1 . .   . . 2 3   0 1 . .   . . 2 3    0 ↔ 2, 1 ↔ 3 exchange quarters
        #   complete       0 . . .   . . 2 .   . 1 . .   . . . 3
        #   The allgather goes back up: distance 2, then distance 1.
        #
        # Near partners come first, because the first step sends most bytes, and near ranks may share a host.
        bounds = np.concatenate(([0], np.cumsum(split(data.size, core.size)))).tolist()
        first, last = 0, core.size
        exchanges: list[tuple[int, Array, Array]] = []
        distance = 1
        while distance < core.size:
            partner = core.rank(index ^ distance)
            middle = (first + last) // 2
            lower, upper = data[bounds[first] : bounds[middle]], data[bounds[middle] : bounds[last]]
            if index & distance:
                given, kept, first = lower, upper, middle
            else:
                given, kept, last = upper, lower, middle
            incoming = scratch[: kept.size]
            transport.sendrecv(given, partner, incoming, partner)
            combine(kept, incoming)
            exchanges.append((partner, given, kept))
            distance *= 2
        for partner, given, kept in reversed(exchanges):
            transport.sendrecv(kept, partner, given, partner)
    core.fold_out(transport, data)
