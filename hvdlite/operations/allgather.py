"""Allgather: the rows of all ranks, on all ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.operations.absent import AbsentTensor
from hvdlite.operations.base import TensorOperation
from hvdlite.operations.device_rows import allgather_on_device


class Allgather(TensorOperation, kind="allgather"):
    """Concatenate the ranks' tensors along the first dimension, whose length may differ. Scalars become a vector."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self.signature = (self.kind, tuple((info.dtype, (None, *info.shape[1:])) for info in self.infos), self.where)

    @classmethod
    def of_absent(cls, absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Allgather:
        return cls(absent)

    def exchange_on_device(self, collectives: HierarchicalCollectives, channel: DeviceCollectives) -> list[Any]:
        return allgather_on_device(self, collectives, channel)

    def exchange(self, collectives: HierarchicalCollectives) -> list[Any]:
        arrays = [
            np.atleast_1d(adapter.to_array(tensor, wide=False))
            for adapter, tensor in zip(self.adapters, self.tensors, strict=True)
        ]
        lengths = np.empty((collectives.size, len(arrays)), np.int64)
        own = np.array([array.shape[0] for array in arrays], np.int64)
        collectives.allgather(own, lengths.reshape(-1), [len(arrays)] * collectives.size)
        results = []
        for index, array in enumerate(arrays):
            out = np.empty((int(lengths[:, index].sum()), *array.shape[1:]), array.dtype)
            row = math.prod(array.shape[1:])
            collectives.allgather(array.reshape(-1), out.reshape(-1), [int(n) * row for n in lengths[:, index]])
            results.append(self.adapters[index].from_array(out, self.infos[index].dtype, self.tensors[index]))
        return results
