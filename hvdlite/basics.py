"""The names that every package of hvdlite has: `hvdlite`, `hvdlite_torch`, `hvdlite_tf` and `hvdlite_tf.keras`.

These are the names without a framework in them: the start and the end of a job, who this rank is, process sets, the kinds of
reduction, and the errors. A package takes them by ``from hvdlite.basics import *`` and adds ``basics.__all__`` to its own
`__all__`, so each name is listed here only, and editors and type checkers find it in all four packages. (Horovod has a module
of this name for the same purpose.) The operations on tensors are not here, for each package has its own.
"""

from __future__ import annotations

from hvdlite.api import (
    Adasum,
    Average,
    Max,
    Min,
    ProcessGrid,
    Product,
    Sum,
    add_process_set,
    barrier_async,
    cross_rank,
    cross_size,
    describe,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    is_server,
    local_rank,
    local_size,
    mpi_threads_supported,
    new_group,
    rank,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from hvdlite.async_sgd.compensation import DCASGD, StalenessRate
from hvdlite.errors import (
    ArgumentError,
    CheckpointError,
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
from hvdlite.errors import CommunicationError as HorovodInternalError
from hvdlite.gradients.lossy.names import Compression
from hvdlite.operations.negotiation.handle import Handle
from hvdlite.protocols import ReduceOp
from hvdlite.ranks.process_set import ProcessSet

__all__ = [
    "DCASGD",
    "Adasum",
    "ArgumentError",
    "Average",
    "CheckpointError",
    "CommunicationError",
    "Compression",
    "DuplicateNameError",
    "Handle",
    "HorovodInternalError",
    "HvdliteError",
    "LaunchError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "NotYetError",
    "OutOfSyncError",
    "PeerLeftError",
    "ProcessGrid",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "StalenessRate",
    "Sum",
    "ThreadLevelError",
    "UnsupportedTensorError",
    "WorkerError",
    "WorldSizeError",
    "add_process_set",
    "barrier_async",
    "cross_rank",
    "cross_size",
    "describe",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_server",
    "local_rank",
    "local_size",
    "mpi_threads_supported",
    "new_group",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
