"""What a rank that has joined does in the operations of the others, made from what these have agreed on."""

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
"""The kind of what a rank that has joined makes as the others do: see `hvdlite.gradients.shared_reducers`."""


def stand_in(signature: Signature, rank: int, size: int) -> Operation:
    """The operation of a rank that has none of its own: it adds nothing, and drops what it receives.

    Args:
        signature: Of the operation on the other ranks; one that `why_not_without` lets pass.
        rank: This rank in the group.
        size: The number of ranks in the group.
    """
    kind, tensors, given = signature
    arguments = dict(given)
    place = arguments.pop("device", None)
    # Where lengths may differ from rank to rank, this one has no rows.
    nothing = [AbsentTensor(dtype, tuple(length or 0 for length in shape), place) for dtype, shape in tensors]
    return _MAKERS[kind](nothing, arguments, rank, size)


def why_not_without(signature: Signature, joined: Sequence[int]) -> str | None:
    """Why an operation cannot be done if the ranks `joined` have nothing to add; None if it can."""
    kind, _, arguments = signature
    if kind not in _MAKERS and kind != SHARED_BUCKETS:
        return "it needs every rank"
    root = dict(arguments).get("root_rank")
    return f"rank {root} is its root" if root in joined else None


def _allreduce(nothing: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
    return Allreduce(nothing, ReduceOp(arguments.pop("op")), **arguments)


def _reducescatter(nothing: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
    return Reducescatter(nothing, ReduceOp(arguments.pop("op")), **arguments)


def _allgather(nothing: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
    return Allgather(nothing)


def _alltoall(nothing: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
    return Alltoall(nothing, np.zeros(size, np.int64), size)


def _broadcast(nothing: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
    return Broadcast(nothing, arguments["root_rank"], size)


def _barrier(nothing: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
    return Barrier()


def _broadcast_object(nothing: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
    return _DroppedBroadcastObject(None, arguments["root_rank"], rank, size)


def _allgather_object(nothing: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Operation:
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
    """Nobody looks at the object, so it is not unpickled: that may run code and need modules of the program."""

    def run(self, collectives: HierarchicalCollectives) -> None:
        self.receive(collectives)


class _DroppedAllgatherObject(AllgatherObject):
    """As `_DroppedBroadcastObject`. This rank's object is None."""

    def run(self, collectives: HierarchicalCollectives) -> list[Any]:
        self.receive(collectives)
        return []
