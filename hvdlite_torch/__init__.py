"""hvdlite for PyTorch: ``import hvdlite_torch as hvd``.

Everything of `hvdlite`, the blocking operations differentiable, and the one-line wrap for optimizers.
"""

from __future__ import annotations

from hvdlite import (
    ArgumentError,
    Average,
    DuplicateNameError,
    Handle,
    HvdliteError,
    Max,
    Min,
    MismatchError,
    NotInitializedError,
    PeerLeftError,
    ProcessSet,
    Product,
    ReduceOp,
    Sum,
    UnsupportedTensorError,
    add_process_set,
    allgather_async,
    allgather_object,
    allreduce_async,
    alltoall_async,
    barrier,
    barrier_async,
    broadcast_async,
    broadcast_object,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    reducescatter_async,
    remove_process_set,
    shutdown,
    size,
)
from hvdlite.extras import require

# First, for the modules below import it.
require("torch", "torch", "hvdlite_torch")

from hvdlite_torch.operations import allgather, allreduce, alltoall, broadcast, reducescatter  # noqa: E402
from hvdlite_torch.optimizer import DistributedOptimizer  # noqa: E402
from hvdlite_torch.state import broadcast_optimizer_state, broadcast_parameters  # noqa: E402

__all__ = [
    "ArgumentError",
    "Average",
    "DistributedOptimizer",
    "DuplicateNameError",
    "Handle",
    "HvdliteError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PeerLeftError",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "UnsupportedTensorError",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "barrier_async",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
]
