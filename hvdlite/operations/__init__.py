"""What the ranks can do together: one class per operation, each knowing what must agree and how it runs.

An operation is built on one rank from that rank's tensors (bad arguments raise here, before anything is sent),
submitted to the engine, and run by it when every rank has submitted its own.
"""

from __future__ import annotations

from hvdlite.operations.base import Agreement, Barrier, Join, Operation, Signature, describe
from hvdlite.operations.moving import Allgather, Alltoall, Broadcast
from hvdlite.operations.objects import AllgatherObject, BroadcastObject
from hvdlite.operations.reducing import Allreduce, Reducescatter
from hvdlite.operations.stand_in import SHARED_BUCKETS, stand_in, why_not_without

__all__ = [
    "SHARED_BUCKETS",
    "Agreement",
    "Allgather",
    "AllgatherObject",
    "Allreduce",
    "Alltoall",
    "Barrier",
    "Broadcast",
    "BroadcastObject",
    "Join",
    "Operation",
    "Reducescatter",
    "Signature",
    "describe",
    "stand_in",
    "why_not_without",
]
