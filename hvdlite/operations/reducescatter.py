"""Reducescatter: each rank gets its rows of the reduced tensor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.operations.absent import AbsentTensor
from hvdlite.operations.base import TensorOperation
from hvdlite.operations.device_reduction import DevicePiece, DeviceReduction
from hvdlite.operations.on_device import agree
from hvdlite.operations.reducible import check_op, check_reducible
from hvdlite.protocols import ReduceOp
from hvdlite.tensors.reduction import reduction


class Reducescatter(TensorOperation, kind="reducescatter"):
    """Reduce tensors over the ranks. Each rank keeps its own rows of the result, as `split_rows` divides them."""

    def __init__(self, given: Any, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0) -> None:
        check_op(op)
        if op is ReduceOp.ADASUM:
            raise ArgumentError("op=Adasum: reducescatter takes Sum, Average, Min, Max and Product. Use allreduce.")
        super().__init__(given)
        for info in self.infos:
            check_reducible(info.dtype, op)
            if not info.shape:
                raise UnsupportedTensorError(
                    "reducescatter splits the first dimension among the ranks; a 0-d tensor has none."
                )
        self.reductions = {
            info.dtype: reduction(info.dtype, op, float(prescale), float(postscale)) for info in self.infos
        }
        arguments = (("op", op.value), ("prescale", float(prescale)), ("postscale", float(postscale)), *self.where)
        self.signature = (self.kind, tuple(self.infos), arguments)

    @classmethod
    def of_absent(cls, absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Reducescatter:
        return cls(absent, ReduceOp(arguments.pop("op")), **arguments)

    def exchange_on_device(self, collectives: HierarchicalCollectives, channel: DeviceCollectives) -> list[Any]:
        natives = self.device_inputs.natives if self.device_inputs else [None] * len(self.tensors)
        counts = []
        reductions: list[DeviceReduction | None] = []
        problem: Exception | None = None
        for info in self.infos:
            rows = split_rows(info.shape[0], collectives.size)
            counts.append([n * math.prod(info.shape[1:]) for n in rows])
        try:
            for native, info, mine in zip(natives, self.infos, counts, strict=True):
                how = self.reductions[info.dtype].among(collectives.size)
                there = how.on_device(channel.nccl_version) is not None
                piece = DevicePiece(native, info.shape, False)
                reductions.append(DeviceReduction([piece], how, channel, mine) if there else None)
        except Exception as error:
            problem = error
        agree(collectives, problem)
        results: list[Any] = []
        for index, on_device in enumerate(reductions):
            if on_device is None:
                results.append(self._run_one(self.tensors[index], self.adapters[index], self.infos[index], collectives))
                continue
            kept = on_device.reduce_scatter()
            rows = split_rows(self.infos[index].shape[0], collectives.size)
            results.append(channel.device.shaped(kept, (rows[collectives.rank], *self.infos[index].shape[1:])))
        return results

    def exchange(self, collectives: HierarchicalCollectives) -> list[Any]:
        return [self._run_one(*one, collectives) for one in zip(self.tensors, self.adapters, self.infos, strict=True)]

    def _run_one(self, tensor: Any, adapter: Any, info: Any, collectives: HierarchicalCollectives) -> Any:
        how = self.reductions[info.dtype].among(collectives.size).widened
        array = adapter.to_array(tensor, wide=True)
        flat = array.reshape(-1).astype(how.storage)
        rows = split_rows(array.shape[0], collectives.size)
        row = math.prod(array.shape[1:])
        counts = [n * row for n in rows]

        how.scale(flat)
        if isinstance(tensor, AbsentTensor):
            how.neutralize(flat)
        out = np.empty(counts[collectives.rank], flat.dtype)
        collectives.reduce_scatter(flat, out, counts, how)
        shape = (rows[collectives.rank], *array.shape[1:])
        return adapter.from_array(out.astype(array.dtype, copy=False).reshape(shape), info.dtype, tensor)


def split_rows(rows: int, size: int) -> list[int]:
    """Return how many of `rows` rows each of `size` ranks gets. The first ``rows % size`` ranks get one row more."""
    return [rows // size + (rank < rows % size) for rank in range(size)]
