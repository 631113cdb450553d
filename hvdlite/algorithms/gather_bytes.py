"""An allgather of bytes, or of a text, of any length on each rank."""

from __future__ import annotations

import numpy as np

from hvdlite.protocols import Array, Collectives


def allgather_bytes(collectives: Collectives, data: Array) -> list[Array]:
    """Return the `data` of every rank, in the order of the ranks. All ranks of the group call this together.

    Args:
        collectives: The collectives of the group.
        data: The bytes of this rank: uint8, shape ``(n,)``, where n may differ between ranks.
    """
    lengths = np.empty(collectives.size, np.int64)
    collectives.allgather(np.array([data.size], np.int64), lengths, [1] * collectives.size)
    out = np.empty(int(lengths.sum()), np.uint8)
    collectives.allgather(data, out, lengths.tolist())
    return np.split(out, np.cumsum(lengths)[:-1])


def allgather_text(collectives: Collectives, text: str) -> list[str]:
    """Return the `text` of every rank, in the order of the ranks. All ranks of the group call this together."""
    return [each.tobytes().decode() for each in allgather_bytes(collectives, np.frombuffer(text.encode(), np.uint8))]
