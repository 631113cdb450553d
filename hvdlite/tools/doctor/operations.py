"""Runs every operation once on the ranks that there are, and compares the results with what they must be."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite import api
from hvdlite.adapter.distributed_gradient import DistributedGradient
from hvdlite.ranks.process_set import ProcessSet

_LENGTH = 1000


def _allreduce() -> bool:
    n, own = api.size(), np.arange(_LENGTH, dtype=np.float32)
    total = api.allreduce(own + api.rank(), api.Sum)
    small = api.allreduce(np.array([api.rank() + 1.0]), api.Max)
    return np.array_equal(total, n * own + n * (n - 1) / 2) and float(small[0]) == n


def _allgather() -> bool:
    rows = api.allgather(np.full((api.rank() + 1, 2), api.rank()))  # each rank has another number of rows
    return np.array_equal(rows[:, 0], np.repeat(np.arange(api.size()), np.arange(api.size()) + 1))


def _broadcast() -> bool:
    root = api.size() - 1
    found = api.broadcast(np.arange(_LENGTH) + api.rank(), root)
    return np.array_equal(found, np.arange(_LENGTH) + root)


def _alltoall() -> bool:
    found = api.alltoall(api.rank() * api.size() + np.arange(api.size()))
    return np.array_equal(found, np.arange(api.size()) * api.size() + api.rank())


def _reducescatter() -> bool:
    n = api.size()
    found = api.reducescatter(np.arange(2.0 * n), api.Sum)
    return np.array_equal(found, n * np.arange(2.0 * api.rank(), 2.0 * api.rank() + 2))


def _objects() -> bool:
    gathered = api.allgather_object({"rank": api.rank()})
    return gathered == [{"rank": rank} for rank in range(api.size())] and api.broadcast_object(api.rank(), 0) == 0


def _any_order() -> bool:
    """Submit named operations, odd ranks in the other order."""
    names = [f"doctor {index}" for index in range(4)]
    order = names if api.rank() % 2 == 0 else names[::-1]
    handles = {name: api.allreduce_async(np.array([float(names.index(name))]), api.Sum, name) for name in order}
    return all(float(handles[name].wait()[0]) == index * api.size() for index, name in enumerate(names))


def _group() -> bool:
    """Sum over the ranks without the last one."""
    group: ProcessSet = api.new_group(range(max(1, api.size() - 1)))
    right = True
    if group.included():
        count = group.size() or 0
        right = float(api.allreduce(np.ones(1), api.Sum, process_set=group)[0]) == count
    api.remove_process_set(group)
    return right


def _gradients() -> bool:
    combine = DistributedGradient()
    n, large = api.size(), np.ones(2**16, np.float32)
    found: Any = combine({"large": large * api.rank(), "small": np.ones(3)}, weight=1.0)
    return bool(np.allclose(found["large"], (n - 1) / 2) and np.allclose(found["small"], 1.0))


def _barrier() -> bool:
    api.barrier()
    return True


OPERATIONS: dict[str, Callable[[], bool]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "barrier": _barrier,
    "objects": _objects,
    "operations in any order": _any_order,
    "group of ranks": _group,
    "gradients": _gradients,
}
"""What is run, by name. Each returns whether this rank has got what it must get."""


def try_operations(progress: Callable[[str], None] = lambda name: None) -> dict[str, str]:
    """Run all operations. All ranks call this after `init`.

    Args:
        progress: Is called with the name of each operation before it runs.

    Returns:
        For each operation that has failed on this rank, why. After an exception none is run any more.
    """
    failed = {}
    for name, run in OPERATIONS.items():
        progress(name)
        try:
            if not run():
                failed[name] = "the result is wrong"
        except Exception as error:  # whatever it is, it is a finding
            failed[name] = traceback.format_exception_only(error)[-1].strip()
            break
    return failed
