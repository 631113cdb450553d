"""Operations on Python objects, which travel pickled."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.objects import allgather_bytes
from hvdlite.operations.base import Operation, check_root
from hvdlite.protocols import Array


class BroadcastObject(Operation):
    """Give every rank the root's object (pickled)."""

    def __init__(self, value: Any, root: int, rank: int, size: int) -> None:
        self.root = check_root(root, size)
        self.pickled = _pickle(value) if rank == root else None
        self.value = value
        self.signature = ("broadcast_object", (), (("root_rank", self.root),))

    def receive(self, collectives: HierarchicalCollectives) -> Array:
        """The root's object, pickled: uint8, shape ``(n,)``."""
        length = np.array([0 if self.pickled is None else self.pickled.size], np.int64)
        collectives.broadcast(length, self.root)
        data = np.empty(int(length[0]), np.uint8) if self.pickled is None else self.pickled
        collectives.broadcast(data, self.root)
        return data

    def run(self, collectives: HierarchicalCollectives) -> Any:
        data = self.receive(collectives)
        return self.value if self.pickled is not None else pickle.loads(data.tobytes())


class AllgatherObject(Operation):
    """Give every rank the list of everybody's objects, by rank (pickled)."""

    def __init__(self, value: Any) -> None:
        self.pickled = _pickle(value)
        self.signature = ("allgather_object", (), ())

    def receive(self, collectives: HierarchicalCollectives) -> list[Array]:
        """The objects, pickled: for each rank uint8, shape ``(n,)``."""
        return allgather_bytes(collectives, self.pickled)

    def run(self, collectives: HierarchicalCollectives) -> list[Any]:
        return [pickle.loads(data.tobytes()) for data in self.receive(collectives)]


def _pickle(value: Any) -> Array:
    return np.frombuffer(bytearray(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)), np.uint8)
