"""Gathers byte arrays of different lengths from all ranks of a group."""

from __future__ import annotations

import numpy as np

from hvdlite.protocols import Array, Collectives


def allgather_bytes(collectives: Collectives, data: Array) -> list[Array]:
    """Return for each rank its `data`. All ranks call this.

    Args:
        collectives: The collectives of the group.
        data: An array of uint8 and shape ``(n,)``; n may differ between the ranks.
    """
    lengths = np.empty(collectives.size, np.int64)
    collectives.allgather(np.array([data.size], np.int64), lengths, [1] * collectives.size)
    out = np.empty(int(lengths.sum()), np.uint8)
    collectives.allgather(data, out, lengths.tolist())
    return np.split(out, np.cumsum(lengths)[:-1])
