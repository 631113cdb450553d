"""The operations of a rank that has joined: made from the signatures that the other ranks have agreed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.operations.absent import AbsentTensor
from hvdlite.operations.allgather import Allgather
from hvdlite.operations.allreduce import Allreduce
from hvdlite.operations.alltoall import Alltoall
from hvdlite.operations.base import Barrier, Operation, Signature
from hvdlite.operations.broadcast import Broadcast
from hvdlite.operations.objects import AllgatherObject, BroadcastObject
from hvdlite.operations.reducescatter import Reducescatter
from hvdlite.protocols import ReduceOp

SHARED_BUCKETS = "shared gradient buckets"
"""The kind of the operation in which the ranks make buckets for gradients: see `hvdlite.gradients.shared_reducers`."""


def operation_for_absent(signature: Signature, rank: int, size: int) -> Operation:
    """Make the operation of an absent rank: it adds no values, and drops what it receives.

    Args:
        signature: The signature of the operation on the other ranks. `why_absent_refused` must return None for it.
        rank: The rank of this process in the group.
        size: The number of ranks in the group.
    """
    kind, tensors, given = signature
    arguments = dict(given)
    device_kind = arguments.pop("device", None)
    # If a length may differ from rank to rank, this rank has no rows.
    absent = [AbsentTensor(dtype, tuple(length or 0 for length in shape), device_kind) for dtype, shape in tensors]
    return _MAKERS[kind](absent, arguments, rank, size)


def why_absent_refused(signature: Signature, joined: Sequence[int]) -> str | None:
    """Return the reason why an operation cannot run while the ranks `joined` are absent; None if it can."""
    kind, _, arguments = signature
    if kind not in _MAKERS and kind != SHARED_BUCKETS:
        return "it needs every rank"
    root = dict(arguments).get("root_rank")
    return f"rank {root} is its root" if root in joined else None


def _allreduce(absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
    return Allreduce(absent, ReduceOp(arguments.pop("op")), **arguments)


def _reducescatter(absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
    return Reducescatter(absent, ReduceOp(arguments.pop("op")), **arguments)


def _allgather(absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
    return Allgather(absent)


def _alltoall(absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
    return Alltoall(absent, np.zeros(size, np.int64), size)


def _broadcast(absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
    return Broadcast(absent, arguments["root_rank"], size)


def _barrier(absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
    return Barrier()


def _broadcast_object(absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
    return _DroppedBroadcastObject(None, arguments["root_rank"], rank, size)


def _allgather_object(absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
    return _DroppedAllgatherObject(None)


_MAKERS: dict[str, Callable[[list[AbsentTensor], dict[str, Any], int, int], Operation]] = {
    "allreduce": _allreduce,
    "reducescatter": _reducescatter,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "broadcast": _broadcast,
    "barrier": _barrier,
    "broadcast_object": _broadcast_object,
    "allgather_object": _allgather_object,
}


class _DroppedBroadcastObject(BroadcastObject):
    """A `BroadcastObject` that does not unpickle the object: unpickling may run code and need modules of the program."""

    def run(self, collectives: HierarchicalCollectives) -> None:
        self.receive(collectives)


class _DroppedAllgatherObject(AllgatherObject):
    """An `AllgatherObject` that does not unpickle the objects. The object of this rank is None."""

    def run(self, collectives: HierarchicalCollectives) -> list[Any]:
        self.receive(collectives)
        return []
