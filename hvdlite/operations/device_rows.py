"""allgather, broadcast and alltoall on a GPU. The numbers of rows travel through host memory; the rows never do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.operations.base import TensorOperation
from hvdlite.operations.on_device import agree
from hvdlite.protocols import Array, TensorInfo


def _natives(operation: TensorOperation) -> Sequence[Any]:
    return operation.device_inputs.natives if operation.device_inputs is not None else [None] * len(operation.infos)


def _flat(native: Any, info: TensorInfo, channel: DeviceCollectives) -> Any:
    """Return a tensor as a flat contiguous one, copied only if necessary. Without values (None), return new memory."""
    device = channel.device
    if native is None:
        return device.empty([math.prod(info.shape)], info.dtype)
    if device.is_plain(native):
        return device.flat(native)
    flat = device.empty([math.prod(info.shape)], info.dtype)
    device.pack([native], flat)
    return flat


def allgather_on_device(
    operation: TensorOperation, collectives: HierarchicalCollectives, channel: DeviceCollectives
) -> list[Any]:
    """Return for each tensor the rows of all ranks, in their order. The shape is ``(rows of all ranks, …)``."""
    shapes = [info.shape or (1,) for info in operation.infos]
    lengths = np.empty((collectives.size, len(shapes)), np.int64)
    own = np.array([shape[0] for shape in shapes], np.int64)
    collectives.allgather(own, lengths.reshape(-1), [len(shapes)] * collectives.size)
    device, problem = channel.device, None
    rows: list[Any] = []
    results: list[Any] = []
    try:
        for index, (native, info) in enumerate(zip(_natives(operation), operation.infos, strict=True)):
            rows.append(_flat(native, info, channel))
            results.append(device.empty((int(lengths[:, index].sum()), *shapes[index][1:]), info.dtype))
    except Exception as error:  # most likely no memory; `agree` tells the other ranks
        problem = error
    agree(collectives, problem)
    with channel.group():
        for index, (flat, result) in enumerate(zip(rows, results, strict=True)):
            row = math.prod(shapes[index][1:])
            counts = [int(n) * row for n in lengths[:, index]]
            if sum(counts):
                channel.allgather(flat, device.flat(result), counts, channel.stream)
    return results


def broadcast_on_device(
    operation: TensorOperation, root: int, collectives: HierarchicalCollectives, channel: DeviceCollectives
) -> list[Any]:
    """Return the tensors of the root: as new tensors, or in the caller's tensors if the operation is in place."""
    device, problem = channel.device, None
    natives = _natives(operation)
    flats: list[Any] = []
    results: list[Any] = []
    try:
        for native, info in zip(natives, operation.infos, strict=True):
            if operation.inplace and native is not None and device.is_plain(native):
                results.append(native)
            else:
                results.append(device.empty(info.shape, info.dtype))
                if native is not None and collectives.rank == root:
                    device.copy(native, results[-1])
            flats.append(device.flat(results[-1]))
    except Exception as error:
        problem = error
    agree(collectives, problem)
    with channel.group():
        for flat in flats:
            if device.count(flat):
                channel.broadcast(flat, root, channel.stream)
    if not operation.inplace:
        return results
    for native, result in zip(natives, results, strict=True):
        if native is not None and native is not result:
            device.copy(result, native)
    return operation.tensors


def alltoall_on_device(
    operation: TensorOperation,
    splits: Sequence[Array],
    collectives: HierarchicalCollectives,
    channel: DeviceCollectives,
) -> list[tuple[Any, Any]]:
    """Send rows to every rank, and receive rows from every rank.

    Args:
        operation: The operation with the tensors of this rank.
        splits: For each tensor the number of its rows that each rank gets, of shape ``(size,)``.
        collectives, channel: The collectives of the group on host memory and on the GPU.

    Returns:
        For each tensor the received rows, in the order of the senders, and the number of rows from each (int32).
    """
    device, problem = channel.device, None
    ones = [1] * collectives.size
    all_received: list[Array] = []
    for split in splits:
        received = np.empty(collectives.size, np.int64)
        collectives.alltoall(split, ones, received, ones)
        all_received.append(received)
    rows: list[Any] = []
    results: list[Any] = []
    numbers: list[Any] = []
    try:
        for native, info, received in zip(_natives(operation), operation.infos, all_received, strict=True):
            rows.append(_flat(native, info, channel))
            results.append(device.empty((int(received.sum()), *info.shape[1:]), info.dtype))
            numbers.append(device.empty([collectives.size], "int32"))
    except Exception as error:
        problem = error
    agree(collectives, problem)
    for index, info in enumerate(operation.infos):
        row = math.prod(info.shape[1:])
        send, recv = ([int(n) * row for n in counts] for counts in (splits[index], all_received[index]))
        channel.alltoall(rows[index], send, device.flat(results[index]), recv, channel.stream)
        device.from_host(all_received[index].astype(np.int32), numbers[index])
    return list(zip(results, numbers, strict=True))
