"""What the ranks can do together: one class per operation, each knowing what must agree and how it runs.

An operation is built on one rank from that rank's tensors (bad arguments raise here, before anything is sent),
submitted to the engine, and run by it when every rank has submitted its own.

- `base`: what every operation is.
- `allreduce`, `reducescatter`, `allgather`, `broadcast`, `alltoall`, `objects`: the operations.
- `reducible`: which reductions make sense for which dtypes.
- `on_device`: the same on tensors that lie on a GPU; `device_reduction`, `device_rows`: what is reduced there, what is moved.
- `joined`, `absent`: what a rank that has joined does in the operations of the others, and with which tensors.
"""

from __future__ import annotations

from hvdlite.operations.allgather import Allgather
from hvdlite.operations.allreduce import Allreduce
from hvdlite.operations.alltoall import Alltoall
from hvdlite.operations.base import Agreement, Barrier, Join, Operation, Signature, describe
from hvdlite.operations.broadcast import Broadcast
from hvdlite.operations.joined import SHARED_BUCKETS, stand_in, why_not_without
from hvdlite.operations.objects import AllgatherObject, BroadcastObject
from hvdlite.operations.reducescatter import Reducescatter

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
