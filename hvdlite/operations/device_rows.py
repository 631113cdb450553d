"""allgather, broadcast and alltoall on a GPU. How much goes where is agreed over the host; the rows never come there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.gpu.collectives import DeviceCollectives
from hvdlite.operations.base import TensorOperation
from hvdlite.operations.on_device import agree
from hvdlite.protocols import Array, TensorInfo


def _natives(operation: TensorOperation) -> Sequence[Any]:
    return operation.place.natives if operation.place is not None else [None] * len(operation.infos)


def _flat(native: Any, info: TensorInfo, channel: DeviceCollectives) -> Any:
    """The elements of a tensor side by side: where they are, or a copy; of one without values, memory in its place."""
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
    """The ranks' rows, one after the other, for each tensor. Shape ``(rows of all ranks, …)``."""
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
    except Exception as error:  # most of all: no memory; the others must hear of it
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
    """The root's tensors: new ones, or the caller's, overwritten."""
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
    """Send rows to every rank.

    Args:
        operation: Its tensors.
        splits: For each tensor how many of its rows each rank gets.
        collectives, channel: The group.

    Returns:
        For each tensor the rows received, in the order of the senders, and how many came from each (int32).
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
