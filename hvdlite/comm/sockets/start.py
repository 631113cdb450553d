"""The ranks of a job on several hosts agree on whether large data goes between the hosts by sockets."""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Sequence

import numpy as np

from hvdlite.algorithms.gather_bytes import allgather_bytes
from hvdlite.comm.sockets.endpoint import Endpoint
from hvdlite.config import Config
from hvdlite.errors import ArgumentError
from hvdlite.launcher_link.link import Address
from hvdlite.protocols import Collectives
from hvdlite.ranks.network import has_fabric


def start(flat: Collectives, config: Config, only: Sequence[str] = ()) -> Endpoint | None:
    """Return this rank's endpoint; on all ranks None if MPI carries everything. All ranks of the job call this.

    Args:
        flat: Collectives of all ranks.
        config: The settings.
        only: See `own_addresses`.

    Raises:
        ArgumentError: The ranks have different settings. All ranks raise it.
    """
    mine = {"way": config.between_hosts, "fabric": has_fabric(), "key": secrets.token_hex(32)}
    data = np.frombuffer(json.dumps(mine).encode(), np.uint8)
    said = [json.loads(each.tobytes()) for each in allgather_bytes(flat, data)]
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
    return Endpoint(secret, config.port_range, only)
