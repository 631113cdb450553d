"""Allreduce: the values of all ranks become one, on all ranks."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from hvdlite.algorithms import ALGORITHMS
from hvdlite.comm.ballot import SHOWN_BYTES
from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.errors import ArgumentError
from hvdlite.operations.absent import AbsentTensor
from hvdlite.operations.base import OperationTensor, Signature, TensorOperation
from hvdlite.operations.device_reduction import DevicePiece, DeviceReduction
from hvdlite.operations.on_device import agree
from hvdlite.operations.reducible import check_op, check_reducible
from hvdlite.protocols import Array, ReduceOp, TensorInfo
from hvdlite.tensors.reduction import Reduction, reduction

_ALGORITHM_NAMES = ("auto", "shared_memory", "mpi", *ALGORITHMS)


class Allreduce(TensorOperation, kind="allreduce"):
    """Reduce tensors elementwise over the ranks. Several tensors, and several such operations, share one message.

    float16 and bfloat16 are accumulated in float32 and rounded once at the end. An average of integers is summed in 64 bits and
    rounded toward zero. An average is right where it fits in its dtype, also if the sum does not.
    """

    def __init__(
        self,
        given: Any,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        algorithm: str = "auto",
        inplace: bool = False,
    ) -> None:
        check_op(op)
        if algorithm not in _ALGORITHM_NAMES:
            raise ArgumentError(f"algorithm={algorithm!r}: expected one of {', '.join(map(repr, _ALGORITHM_NAMES))}.")
        if op is ReduceOp.ADASUM and algorithm != "auto":
            raise ArgumentError(f"algorithm={algorithm!r}: Adasum has one algorithm only; leave the argument out.")
        super().__init__(given, inplace)
        self.algorithm = algorithm
        self.signature, self.reductions, self.nbytes, self.fusion_key, self.is_small = _plan_allreduce(
            tuple(self.infos), op, float(prescale), float(postscale), algorithm, self.where
        )

    @classmethod
    def of_absent(cls, absent: list[AbsentTensor], arguments: dict[str, Any], rank: int, size: int) -> Allreduce:
        return cls(absent, ReduceOp(arguments.pop("op")), **arguments)

    @classmethod
    def run_on_host(cls, operations: Sequence[Allreduce], collectives: HierarchicalCollectives) -> list[Any]:
        parts = _parts_of(operations)
        first, size = operations[0], collectives.size
        if len(parts) == len(operations) == 1:
            how = first.reductions[parts[0].dtype].among(size)
            return [_reduce_parts(parts, how, first.algorithm, collectives)]
        results: list[Any] = [None] * len(parts)
        for dtype, indices in _by_dtype(parts).items():
            how = first.reductions[dtype].among(size)
            reduced = _reduce_parts([parts[i] for i in indices], how, first.algorithm, collectives)
            for index, result in zip(indices, reduced, strict=True):
                results[index] = result
        return _of_each(operations, results)

    @classmethod
    def run_on_device(
        cls, operations: Sequence[Allreduce], collectives: HierarchicalCollectives, channel: DeviceCollectives
    ) -> list[Any]:
        parts = _parts_of(operations)
        natives = [
            native
            for operation in operations
            for native in (
                operation.device_inputs.natives if operation.device_inputs else [None] * len(operation.tensors)
            )
        ]
        shapes = [info.shape for operation in operations for info in operation.infos]
        first = operations[0]
        results: list[Any] = [None] * len(parts)
        reductions: list[tuple[list[int], DeviceReduction]] = []
        on_host: list[tuple[list[int], Reduction]] = []
        problem: Exception | None = None
        try:
            for dtype, indices in _by_dtype(parts).items():
                how = first.reductions[dtype].among(collectives.size)
                if first.algorithm != "auto" or how.on_device(channel.nccl_version) is None:
                    on_host.append((indices, how))
                    continue
                pieces = [DevicePiece(natives[i], shapes[i], parts[i].inplace) for i in indices]
                reductions.append((indices, DeviceReduction(pieces, how, channel)))
        except Exception as error:  # most likely no memory; `agree` tells the other ranks
            problem = error
        agree(collectives, problem)
        for indices, how in on_host:
            reduced = _reduce_parts([parts[i] for i in indices], how, first.algorithm, collectives)
            for index, result in zip(indices, reduced, strict=True):
                results[index] = result
        for indices, on_device in reductions:
            for index, result in zip(indices, on_device.allreduce(), strict=True):
                results[index] = parts[index].tensor if parts[index].inplace else result
        return _of_each(operations, results)


def _parts_of(operations: Sequence[Allreduce]) -> list[OperationTensor]:
    return [
        OperationTensor(tensor, adapter, info.dtype, operation.inplace)
        for operation in operations
        for tensor, adapter, info in zip(operation.tensors, operation.adapters, operation.infos, strict=True)
    ]


def _by_dtype(parts: Sequence[OperationTensor]) -> dict[str, list[int]]:
    """Return for each dtype the indices of its parts."""
    by_dtype: dict[str, list[int]] = {}
    for index, part in enumerate(parts):
        by_dtype.setdefault(part.dtype, []).append(index)
    return by_dtype


def _of_each(operations: Sequence[Allreduce], results: list[Any]) -> list[Any]:
    """Divide the results of all parts into a list for each operation."""
    grouped, start = [], 0
    for operation in operations:
        grouped.append(results[start : start + len(operation.tensors)])
        start += len(operation.tensors)
    return grouped


@functools.lru_cache(maxsize=4096)  # a program makes the same few calls again and again
def _plan_allreduce(
    infos: tuple[TensorInfo, ...],
    op: ReduceOp,
    prescale: float,
    postscale: float,
    algorithm: str,
    where: tuple[tuple[str, Any], ...],
) -> tuple[Signature, dict[str, Reduction], int, Hashable, bool]:
    """Return what depends only on the arguments: ``signature``, ``reductions``, ``nbytes``, ``fusion_key`` and ``is_small``."""
    for info in infos:
        check_reducible(info.dtype, op)
    reductions = {info.dtype: reduction(info.dtype, op, prescale, postscale) for info in infos}
    nbytes = sum(reductions[info.dtype].wide_bytes * math.prod(info.shape) for info in infos)
    arguments: list[tuple[str, Any]] = [("op", op.value)]
    if (prescale, postscale, algorithm) != (1.0, 1.0, "auto"):
        arguments += [("prescale", prescale), ("postscale", postscale), ("algorithm", algorithm)]
    arguments += where
    fusion_key = (next(iter(reductions.values())), algorithm, where) if len(reductions) == 1 else None
    is_small = nbytes <= SHOWN_BYTES and fusion_key is not None and not where and algorithm == "auto"
    is_small = is_small and op is not ReduceOp.ADASUM and prescale == 1.0  # otherwise tensors are scaled first
    return ("allreduce", infos, tuple(arguments)), reductions, nbytes, fusion_key, is_small


def _reduce_parts(
    parts: list[OperationTensor], how: Reduction, algorithm: str, collectives: HierarchicalCollectives
) -> list[Any]:
    """Reduce tensors of one dtype as one flat array, and return a result for each."""
    if how.op is ReduceOp.ADASUM:
        return _adasum_parts(parts, how, collectives)
    scales = how.before != 1.0
    if scales:
        how = how.widened  # else float16 and bfloat16 would be rounded twice
    arrays = [part.adapter.to_array(part.tensor, wide=scales) for part in parts]
    if len(parts) == 1:  # a small blocking call is counted in microseconds: it makes no view that it does not need
        flat = arrays[0] if arrays[0].ndim == 1 else arrays[0].reshape(-1)
        own = parts[0].inplace and flat.dtype == how.storage and flat.flags.writeable
        if not own:
            flat = flat.astype(how.storage)
    else:
        flat = np.concatenate([array.reshape(-1) for array in arrays], dtype=how.storage, casting="unsafe")
    if scales:
        how.scale(flat)
    if parts[0].is_absent or (len(parts) > 1 and any([part.is_absent for part in parts])):
        for where in _where_nothing_is(parts, arrays):
            how.neutralize(flat[where])
    collectives.allreduce(flat, how, algorithm)
    if len(parts) == 1 and own and arrays[0] is parts[0].tensor:  # reduced in place, without a copy
        return [parts[0].tensor]
    if flat.dtype != arrays[0].dtype:
        flat = flat.astype(arrays[0].dtype)
    if len(parts) == 1:
        return [parts[0].deliver(flat if arrays[0].ndim == 1 else flat.reshape(arrays[0].shape))]
    results, start = [], 0
    for part, array in zip(parts, arrays, strict=True):
        piece = flat[start : start + array.size].reshape(array.shape)
        start += array.size
        # A result that is a view would keep the memory of all parts alive.
        results.append(part.deliver(piece if part.inplace else piece.copy()))
    return results


def _where_nothing_is(parts: list[OperationTensor], arrays: list[Array]) -> list[slice]:
    ends = itertools.accumulate(array.size for array in arrays)
    return [
        slice(end - array.size, end) for part, array, end in zip(parts, arrays, ends, strict=True) if part.is_absent
    ]


def _adasum_parts(parts: list[OperationTensor], how: Reduction, collectives: HierarchicalCollectives) -> list[Any]:
    """Combine tensors of one dtype by Adasum, each tensor by itself; they share their messages."""
    arrays = [part.adapter.to_array(part.tensor, wide=True) for part in parts]
    for index, (part, array) in enumerate(zip(parts, arrays, strict=True)):
        if not (part.inplace and array.flags.writeable):
            arrays[index] = array.copy()
    flats = [array.reshape(-1) for array in arrays]
    for flat in flats:
        how.scale(flat)
    collectives.adasum(flats)
    for flat in flats:
        how.finish(flat)
    return [part.deliver(array) for part, array in zip(parts, arrays, strict=True)]
