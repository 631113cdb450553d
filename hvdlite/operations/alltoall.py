"""Alltoall: each rank sends some of its rows to each rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.operations.absent import AbsentTensor
from hvdlite.operations.base import TensorOperation
from hvdlite.operations.device_rows import alltoall_on_device
from hvdlite.protocols import Array
from hvdlite.tensors.registry import adapter_for, device_kind_of


class Alltoall(TensorOperation, kind="alltoall"):
    """Send a slice of the rows to every rank, and receive a slice from every rank.

    Each result is a pair: the received rows in the order of the senders, and the number of rows from each sender (int32, shape
    ``(size,)``). If the caller gave no splits, the result is the rows alone.
    """

    def __init__(self, given: Any, splits: Any, size: int) -> None:
        super().__init__(given)
        for info in self.infos:
            if not info.shape:
                raise UnsupportedTensorError(
                    "alltoall splits the first dimension among the ranks; a 0-d tensor has none."
                )
        self.even = splits is None
        self.splits = [_check_splits(splits, info.shape[0], size) for info in self.infos]
        self.signature = (self.kind, tuple((info.dtype, (None, *info.shape[1:])) for info in self.infos), self.where)

    @classmethod
    def of_absent(cls, absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Alltoall:
        return cls(absent, np.zeros(size, np.int64), size)

    def exchange_on_device(self, collectives: HierarchicalCollectives, channel: DeviceCollectives) -> list[Any]:
        pairs = alltoall_on_device(self, self.splits, collectives, channel)
        return [rows for rows, _ in pairs] if self.even else pairs

    def exchange(self, collectives: HierarchicalCollectives) -> list[Any]:
        return [
            self._run_one(*one, collectives)
            for one in zip(self.tensors, self.adapters, self.infos, self.splits, strict=True)
        ]

    def _run_one(
        self, tensor: Any, adapter: Any, info: Any, splits: Array, collectives: HierarchicalCollectives
    ) -> Any:
        array = adapter.to_array(tensor, wide=False)
        received = np.empty(collectives.size, np.int64)
        ones = [1] * collectives.size
        collectives.flat.alltoall(splits, ones, received, ones)
        row = math.prod(array.shape[1:])
        out = np.empty((int(received.sum()), *array.shape[1:]), array.dtype)
        send_counts, recv_counts = ([int(n) * row for n in counts] for counts in (splits, received))
        collectives.alltoall(array.reshape(-1), send_counts, out.reshape(-1), recv_counts)
        result = adapter.from_array(out, info.dtype, tensor)
        return result if self.even else (result, adapter.from_array(received.astype(np.int32), "int32", tensor))


def _check_splits(splits: Any, rows: int, size: int) -> Array:
    if splits is None:
        if rows % size:
            raise ArgumentError(
                f"alltoall without splits needs a first dimension that {size} ranks divide; got {rows}. Pass splits."
            )
        return np.full(size, rows // size, np.int64)
    if not isinstance(splits, np.ndarray | list | tuple) and device_kind_of(splits, adapter_for(splits)) is not None:
        splits = adapter_for(splits).to_array(splits, wide=False)
    given = np.asarray(splits)
    if given.dtype.kind not in "iu" and given.size:
        raise ArgumentError(f"splits={splits!r}: expected {size} whole numbers.")
    if given.shape != (size,) or (given < 0).any() or int(given.sum()) != rows:
        raise ArgumentError(
            f"splits={given.tolist()}: expected {size} numbers >= 0, one for each rank, that add up to the first "
            f"dimension, {rows}; they are {given.size} and add up to {int(given.sum())}."
        )
    return given.astype(np.int64)
