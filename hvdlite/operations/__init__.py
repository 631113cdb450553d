"""The named operations, one class each. A class says what the ranks must agree on, and runs the operation.

A rank makes an operation from its own tensors; bad arguments raise at this point, before anything is sent. The rank submits
the operation to its engine. The engine runs it when every rank has submitted its own.

- `base`: the base classes of all operations, and the small operations `Barrier`, `Milestone`, `Join` and
  `Agreement`.
- `allreduce`, `reducescatter`, `allgather`, `broadcast`, `alltoall`, `objects`: one operation each; `objects` has two, on
  Python objects.
- `reducible`: the reductions that each dtype allows.
- `on_device`: operations on tensors that lie on a GPU; `device_reduction` reduces there, and `device_rows` moves rows there.
- `negotiation/`: the ranks agree on which operations run now, in which order.
- `absent`: the tensors of a rank that has joined, which takes part in what the others have submitted (`Operation.of_absent`).
"""

from __future__ import annotations

from hvdlite.operations.allgather import Allgather
from hvdlite.operations.allreduce import Allreduce
from hvdlite.operations.alltoall import Alltoall
from hvdlite.operations.base import (
    SHARED_BUCKETS,
    Agreement,
    Barrier,
    Join,
    Milestone,
    Operation,
    Signature,
    describe,
    needs_every_rank,
    operation_for_absent,
    why_absent_refused,
)
from hvdlite.operations.broadcast import Broadcast
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
    "Milestone",
    "Operation",
    "Reducescatter",
    "Signature",
    "describe",
    "needs_every_rank",
    "operation_for_absent",
    "why_absent_refused",
]
