"""Bytes of any length, gathered from all ranks of a group."""

from __future__ import annotations

import numpy as np

from hvdlite.protocols import Array, Collectives


def allgather_bytes(collectives: Collectives, data: Array) -> list[Array]:
    """Every rank's `data`, by rank.

    Args:
        collectives: Of the group; all ranks call this.
        data: uint8, shape ``(n,)``, n of this rank's own.
    """
    lengths = np.empty(collectives.size, np.int64)
    collectives.allgather(np.array([data.size], np.int64), lengths, [1] * collectives.size)
    out = np.empty(int(lengths.sum()), np.uint8)
    collectives.allgather(data, out, lengths.tolist())
    return np.split(out, np.cumsum(lengths)[:-1])
