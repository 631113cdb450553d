"""Broadcast: one rank's tensor on all ranks."""

from __future__ import annotations

from typing import Any

from hvdlite.comm.ballot import SHOWN_BYTES
from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.operations.absent import AbsentTensor
from hvdlite.operations.base import OperationTensor, TensorOperation, check_root
from hvdlite.operations.device_rows import broadcast_on_device
from hvdlite.tensors.reduction import nbytes_of


class Broadcast(TensorOperation, kind="broadcast"):
    """Give every rank the tensors of the root."""

    def __init__(self, given: Any, root: int, size: int, inplace: bool = False) -> None:
        self.root = check_root(root, size)
        super().__init__(given, inplace)
        self.signature = (self.kind, tuple(self.infos), (("root_rank", self.root), *self.where))
        on_host = len(self.infos) == 1 and self.device_kind is None
        self.is_small = on_host and nbytes_of(self.infos[0]) <= SHOWN_BYTES

    @classmethod
    def of_absent(cls, absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Broadcast:
        return cls(absent, arguments["root_rank"], size)

    def exchange_on_device(self, collectives: HierarchicalCollectives, channel: DeviceCollectives) -> list[Any]:
        return broadcast_on_device(self, self.root, collectives, channel)

    def exchange(self, collectives: HierarchicalCollectives) -> list[Any]:
        results = []
        for tensor, adapter, (dtype, _) in zip(self.tensors, self.adapters, self.infos, strict=True):
            array = adapter.to_array(tensor, wide=False)
            if not (self.inplace and array.flags.writeable):
                array = array.copy()
            collectives.broadcast(array.reshape(-1), self.root)
            results.append(OperationTensor(tensor, adapter, dtype, self.inplace).deliver(array))
        return results
