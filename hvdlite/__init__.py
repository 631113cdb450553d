"""Data-parallel training in one line, over MPI.

``import hvdlite`` loads no framework and starts no MPI; `init` does. The functions here take NumPy arrays, torch and
TensorFlow tensors and arrays with DLPack, and return the same kind.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hvdlite.adapter import guide
from hvdlite.adapter.distributed_gradient import DistributedGradient
from hvdlite.api import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    add_process_set,
    allgather,
    allgather_async,
    allgather_object,
    allgather_object_async,
    allreduce,
    allreduce_async,
    alltoall,
    alltoall_async,
    barrier,
    barrier_async,
    broadcast,
    broadcast_async,
    broadcast_object,
    broadcast_object_async,
    cross_rank,
    cross_size,
    describe,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    new_group,
    rank,
    reducescatter,
    reducescatter_async,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from hvdlite.errors import (
    ArgumentError,
    CommunicationError,
    DuplicateNameError,
    HvdliteError,
    LaunchError,
    MismatchError,
    NotInitializedError,
    NotYetError,
    OutOfSyncError,
    PeerLeftError,
    ThreadLevelError,
    UnsupportedTensorError,
    WorkerError,
    WorldSizeError,
)
from hvdlite.negotiation.handle import Handle
from hvdlite.process_set import ProcessSet
from hvdlite.protocols import ReduceOp
from hvdlite.tensors.compression import Compression
from hvdlite.tensors.registry import register_adapter

if TYPE_CHECKING:
    from hvdlite.launch.run_function import run

__version__ = "0.1.0"

__all__ = [
    "Adasum",
    "ArgumentError",
    "Average",
    "CommunicationError",
    "Compression",
    "DistributedGradient",
    "DuplicateNameError",
    "Handle",
    "HvdliteError",
    "LaunchError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "NotYetError",
    "OutOfSyncError",
    "PeerLeftError",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "ThreadLevelError",
    "UnsupportedTensorError",
    "WorkerError",
    "WorldSizeError",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allgather_object_async",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "barrier_async",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "broadcast_object_async",
    "cross_rank",
    "cross_size",
    "describe",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "new_group",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "register_adapter",
    "remove_process_set",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    if name == "run":  # the launcher is no part of a training process
        return importlib.import_module("hvdlite.launch.run_function").run
    if name.startswith("__"):  # Python and its tools ask for many of these
        raise AttributeError(f"module 'hvdlite' has no attribute {name!r}")
    raise AttributeError(guide.advice_on(name))


guide.install()
