"""Operations on Python objects. The objects travel pickled.

The caller's thread unpickles them, so an error is raised there. On a rank that has joined nobody does: unpickling may run code
and need modules of the program.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from hvdlite.algorithms.gather_bytes import allgather_bytes
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.operations.absent import AbsentTensor
from hvdlite.operations.base import Operation, check_root
from hvdlite.protocols import Array


class BroadcastObject(Operation, kind="broadcast_object"):
    """Give every rank the object of the root."""

    def __init__(self, value: Any, root: int, rank: int, size: int) -> None:
        self.root = check_root(root, size)
        self.value = value
        self.is_root = rank == root
        self.pickled = _Pickled(value) if self.is_root else None
        self.hand_over = self._unpickle
        self.signature = (self.kind, (), (("root_rank", self.root),))

    @classmethod
    def of_absent(cls, absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> BroadcastObject:
        return cls(None, arguments["root_rank"], rank, size)

    def receive(self, collectives: HierarchicalCollectives) -> Array:
        """Run the broadcast, and return the pickled object of the root: uint8, shape ``(n,)``."""
        own = None if self.pickled is None else self.pickled.data()
        length = np.array([0 if own is None else own.size], np.int64)
        collectives.broadcast(length, self.root)
        data = np.empty(int(length[0]), np.uint8) if own is None else own
        collectives.broadcast(data, self.root)
        return data

    def run(self, collectives: HierarchicalCollectives) -> Any:
        return self.receive(collectives)

    def _unpickle(self, data: Array) -> Any:
        return self.value if self.is_root else pickle.loads(data.tobytes())


class AllgatherObject(Operation, kind="allgather_object"):
    """Give every rank the list of all ranks' objects, in the order of the ranks."""

    def __init__(self, value: Any) -> None:
        self.pickled = _Pickled(value)
        self.hand_over = _unpickle_all
        self.signature = (self.kind, (), ())

    @classmethod
    def of_absent(cls, absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> AllgatherObject:
        return cls(None)

    def receive(self, collectives: HierarchicalCollectives) -> list[Array]:
        """Run the allgather, and return for each rank its pickled object: uint8, shape ``(n,)``."""
        return allgather_bytes(collectives, self.pickled.data())

    def run(self, collectives: HierarchicalCollectives) -> list[Any]:
        return self.receive(collectives)


def _unpickle_all(pickled: list[Array]) -> list[Any]:
    return [pickle.loads(data.tobytes()) for data in pickled]


class _Pickled:
    """A pickled object.

    The constructor raises if the object cannot be pickled: that is a mistake of the program, most likely on all ranks. A lack
    of memory concerns one rank only. So it is raised later, by `data`, when all ranks run the operation and hear of it.
    """

    def __init__(self, value: Any) -> None:
        self._data: Array | None = None
        self._problem = ""
        try:
            self._data = np.frombuffer(bytearray(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)), np.uint8)
        except MemoryError as error:
            self._problem = str(error) or "no memory to pickle the object"

    def data(self) -> Array:
        """Return the bytes of the pickled object: uint8, shape ``(n,)``."""
        if self._data is None:
            raise MemoryError(self._problem)
        return self._data
