"""The ranks of a group connect to each other, or agree that they cannot."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable

import numpy as np

from hvdlite.algorithms.gather_bytes import allgather_bytes
from hvdlite.comm.sockets.endpoint import Card, Endpoint
from hvdlite.protocols import Collectives

_SECONDS = 15.0
"""How long the ranks try."""


def meet(flat: Collectives, endpoint: Endpoint, check: Callable[[], object]) -> dict[int, socket.socket] | str:
    """Connect each two ranks of a group. All of its ranks call this together.

    The higher rank of each two dials the other. The connections get a name by a number that the first rank has drawn, so
    they are never taken for those of another group, or of an earlier one.

    Args:
        flat: Collectives of the group that need no connections.
        endpoint: This rank's.
        check: Raises if nobody shall wait any more.

    Returns:
        The connection to each other rank; or, on all ranks, why there are none.
    """
    rank, size = flat.rank, flat.size
    said = _gather(flat, secrets.token_hex(16).encode() + endpoint.card.encode())
    group = said[0][:32].decode()
    cards = [Card.decode(each[32:]) for each in said]
    if problems := [card.problem for card in cards if card.problem]:
        return problems[0]
    streams: dict[int, socket.socket] = {}
    problem, until = "", time.monotonic() + _SECONDS
    try:
        for other in range(rank):
            streams[other] = endpoint.dial(cards[other], group, rank)
        for other in range(rank + 1, size):
            streams[other] = endpoint.wait_for(group, other, until, check)
    except OSError as error:
        other = len(streams) + (len(streams) >= rank)
        problem = f"from {socket.gethostname()} to {'/'.join(cards[other].addresses)}: {error}"
        if isinstance(error, TimeoutError) and other > rank:
            problem = f"from {'/'.join(cards[other].addresses)} to {socket.gethostname()}: {error}"
    problems = [each.decode() for each in _gather(flat, problem.encode()) if each]
    if not problems:
        return streams
    for stream in streams.values():
        with contextlib.suppress(OSError):
            stream.close()
    return problems[-1]  # a rank that dials knows more than one that waits


def _gather(flat: Collectives, data: bytes) -> list[bytes]:
    return [each.tobytes() for each in allgather_bytes(flat, np.frombuffer(data, np.uint8))]
