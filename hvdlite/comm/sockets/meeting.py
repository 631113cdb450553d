"""The ranks of a job agree on whether they use sockets; those of a group connect to each other, or agree that they cannot."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence

from hvdlite.algorithms.gather_bytes import allgather_text
from hvdlite.comm.sockets.endpoint import Card, SocketEndpoint
from hvdlite.config import Config
from hvdlite.errors import ArgumentError
from hvdlite.launcher_link.link import Address
from hvdlite.protocols import Collectives
from hvdlite.ranks.network import has_fabric

_SECONDS = 15.0
"""How long the ranks of a group try to connect."""


def start(flat: Collectives, config: Config, only: Sequence[str] = ()) -> SocketEndpoint | None:
    """Return this rank's endpoint; on all ranks None if MPI carries everything. All ranks of the job call this.

    Args:
        flat: Collectives of all ranks.
        config: The settings.
        only: See `own_addresses`.

    Raises:
        ArgumentError: The ranks have different settings. All ranks raise it.
    """
    mine = {"way": config.between_hosts, "fabric": has_fabric(), "key": secrets.token_hex(32)}
    said = [json.loads(each) for each in allgather_text(flat, json.dumps(mine))]
    ways = [each["way"] for each in said]
    if len(set(ways)) > 1:
        other = next(rank for rank, way in enumerate(ways) if way != ways[0])
        raise ArgumentError(
            f"HVDLITE_BETWEEN_HOSTS is {ways[0]!r} on rank 0 and {ways[other]!r} on rank {other}: set it alike on all ranks."
        )
    if ways[0] == "mpi" or (ways[0] == "auto" and any(each["fabric"] for each in said)):
        return None
    known = Address.parse(config.control).secret if config.control else ""
    secret = hmac.digest(known.encode(), said[0]["key"].encode(), "sha256").hex()  # another one in each generation
    return SocketEndpoint(secret, config.port_range, only)


def meet(flat: Collectives, endpoint: SocketEndpoint, check: Callable[[], object]) -> dict[int, socket.socket] | str:
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
    said = allgather_text(flat, secrets.token_hex(16) + endpoint.card.encode())
    group = said[0][:32]
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
    problems = [each for each in allgather_text(flat, problem) if each]
    if not problems:
        return streams
    for stream in streams.values():
        with contextlib.suppress(OSError):
            stream.close()
    return problems[-1]  # a rank that dials knows more than one that waits
