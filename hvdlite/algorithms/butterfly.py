"""Butterfly allreduce, also called recursive doubling."""

from __future__ import annotations

import numpy as np

from hvdlite.algorithms.fold import Core
from hvdlite.protocols import Array, Combine, Transport


def butterfly(transport: Transport, data: Array, combine: Combine) -> None:
    """Reduce `data` over the ranks, in place: exchange everything with a partner twice as far in each step.

    After step k each rank has the sum over its block of 2ᵏ⁺¹ ranks. The number of steps is the least possible,
    so this algorithm is the best for short vectors. It sends the whole vector in each step, so it is slow for long ones.
    If P is not a power of two, the extra ranks are folded in beforehand and out afterwards (`Core`).

    Cost for P = 2ᵏ ranks and n bytes: k(α + nβ + nγ).

    Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
    MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005.
    """
    # Time runs down, eight ranks; ↔ is an exchange:
    #
    #   0 ↔ 1   2 ↔ 3   4 ↔ 5   6 ↔ 7     distance 1: sums over blocks of 2
    #   0 ↔ 2   1 ↔ 3   4 ↔ 6   5 ↔ 7     distance 2: blocks of 4
    #   0 ↔ 4   1 ↔ 5   2 ↔ 6   3 ↔ 7     distance 4: all
    core = Core(transport.size)
    current, incoming = data, np.empty_like(data)
    core.fold_in(transport, data, incoming, combine)
    index = core.index(transport.rank)
    if index is not None:
        distance = 1
        while distance < core.size:
            partner = core.rank(index ^ distance)
            transport.sendrecv(current, partner, incoming, partner)
            # All ranks must end with the same bits, although each computes for itself. For the sum of two
            # IEEE numbers the order is irrelevant, but not for the minimum of +0 and -0, nor for the payload
            # of NaNs. So the block of lower ranks is always the left operand.
            if index & distance:
                current, incoming = incoming, current
            combine(current, incoming)
            distance *= 2
        if current is not data:
            data[...] = current
    core.fold_out(transport, data)
