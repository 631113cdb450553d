"""A collective that hvdlite has not: one class is all that the core needs. docs/architecture.md says how to add one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.api import world
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.errors import MismatchError
from hvdlite.operations.absent import AbsentTensor
from hvdlite.operations.base import TensorOperation
from hvdlite.protocols import Array


class Scan(TensorOperation, kind="scan"):
    """The sum over this rank and those below it, of tensors of any shape."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self.signature = (self.kind, tuple(self.infos), self.where)

    @classmethod
    def of_absent(cls, absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Scan:
        return cls(absent)

    def exchange(self, collectives: HierarchicalCollectives) -> list[Any]:
        return [
            adapter.from_array(self._scan(adapter.to_array(tensor, wide=False), collectives), info.dtype, tensor)
            for tensor, adapter, info in zip(self.tensors, self.adapters, self.infos, strict=True)
        ]

    def _scan(self, own: Array, collectives: HierarchicalCollectives) -> Array:
        rows = np.empty((collectives.size, own.size), own.dtype)
        collectives.allgather(own.reshape(-1), rows.reshape(-1), [own.size] * collectives.size)
        return rows[: collectives.rank + 1].sum(axis=0, dtype=own.dtype).reshape(own.shape)


def scan(given: Any, name: str | None = None) -> Any:
    return world().engine().run(Scan(given), name)


def test_it_runs_in_any_order_and_is_compared(ranks: Any) -> None:
    def check() -> None:
        rank, size = hvd.rank(), hvd.size()
        below = np.arange(rank + 1.0)
        one, other = scan([np.full((2, 2), float(rank)), np.array(3)])
        np.testing.assert_array_equal(one, np.full((2, 2), below.sum()))
        assert other == 3 * (rank + 1)
        names = ["a", "b", "c"]
        handles = {
            name: world().engine().submit(Scan(np.array([ord(name) + rank])), name)
            for name in (names if rank else names[::-1])
        }
        for name, handle in handles.items():
            assert handle.wait() == sum(ord(name) + each for each in range(rank + 1))
        if size > 1:
            with pytest.raises(MismatchError, match=r"rank 0: scan\(float64\(2\)\)"):
                scan(np.ones(2 + rank))

    ranks(check)


@pytest.mark.ranks(at_least=2)
def test_ranks_that_have_joined_take_part(ranks: Any) -> None:
    def check() -> None:
        if hvd.rank():
            assert scan(np.ones(3)).tolist() == [hvd.rank()] * 3
        hvd.join()

    ranks(check)
