"""hvdlite for Keras on TensorFlow: ``import hvdlite_tf as hvd``.

Everything of `hvdlite`, the one-line wrap for optimizers, and the same start on every rank. Keras on torch needs no TensorFlow:
where that is not installed, names that are made of it raise MissingPackageError when they are asked for, and the rest is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdlite import (
    Adasum,
    ArgumentError,
    Average,
    CommunicationError,
    DistributedGradient,
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
    allreduce_async,
    alltoall_async,
    barrier_async,
    broadcast_async,
    cross_rank,
    cross_size,
    describe,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    new_group,
    rank,
    reducescatter_async,
    remove_process_set,
    shutdown,
    size,
)
from hvdlite.adapter.arguments import num_rank_is_power_2 as check_num_rank_power_of_2
from hvdlite.adapter.capabilities import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    nccl_built,
    rocm_built,
)
from hvdlite.adapter.optional import require
from hvdlite.api import mpi_threads_supported, start_timeline, stop_timeline
from hvdlite.errors import CommunicationError as HorovodInternalError
from hvdlite.errors import NotYetError
from hvdlite.tensors.compression import Compression

# First, for the modules below import them.
require("keras", "tf", "hvdlite_tf")
try:
    import keras as _keras  # noqa: F401
except ModuleNotFoundError:  # its backend is not installed
    require("tensorflow", "tf", "hvdlite_tf")
    raise

from hvdlite_tf import callbacks, elastic  # noqa: E402
from hvdlite_tf.callbacks import BroadcastGlobalVariablesCallback  # noqa: E402
from hvdlite_tf.optimizers.wrap import DistributedOptimizer  # noqa: E402
from hvdlite_tf.training.objects import (  # noqa: E402
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    refs_to_vars,
    vars_to_refs,
)
from hvdlite_tf.variables import is_installed, missing  # noqa: E402

if TYPE_CHECKING or is_installed():
    from hvdlite_tf.data.shard import shard
    from hvdlite_tf.gradients.accumulation import (
        LocalGradientAggregationHelper,
        LocalGradientAggregationHelperEager,
    )
    from hvdlite_tf.ops.allgather import allgather, grouped_allgather
    from hvdlite_tf.ops.allreduce import allreduce, grouped_allreduce
    from hvdlite_tf.ops.alltoall import alltoall
    from hvdlite_tf.ops.arguments import handle_average_backwards_compatibility
    from hvdlite_tf.ops.broadcast import broadcast, broadcast_
    from hvdlite_tf.ops.rank_ops import (
        local_rank_op,
        local_size_op,
        process_set_included_op,
        rank_op,
        size_op,
    )
    from hvdlite_tf.ops.reducescatter import grouped_reducescatter, reducescatter
    from hvdlite_tf.optimizers.tape import DistributedGradientTape, PartialDistributedGradientTape
    from hvdlite_tf.optimizers.v1 import BroadcastGlobalVariablesHook, broadcast_global_variables
    from hvdlite_tf.strategy import Strategy
    from hvdlite_tf.training.join import barrier, join
    from hvdlite_tf.training.state import broadcast_variables
    from hvdlite_tf.training.sync_batch_norm import SyncBatchNormalization
else:
    from hvdlite import barrier
    from hvdlite_tf.training.objects import broadcast_eagerly as broadcast_variables
    from hvdlite_tf.training.objects import join_eagerly as join

    def __getattr__(name: str) -> Any:
        if name in _NAMES:
            raise missing(__name__, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Adasum",
    "ArgumentError",
    "Average",
    "BroadcastGlobalVariablesCallback",
    "BroadcastGlobalVariablesHook",
    "CommunicationError",
    "Compression",
    "DistributedGradient",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "DuplicateNameError",
    "Handle",
    "HorovodInternalError",
    "HvdliteError",
    "LocalGradientAggregationHelper",
    "LocalGradientAggregationHelperEager",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "NotYetError",
    "PartialDistributedGradientTape",
    "PeerLeftError",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Strategy",
    "Sum",
    "SyncBatchNormalization",
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
    "broadcast_",
    "broadcast_async",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "describe",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "new_group",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "reducescatter_async",
    "refs_to_vars",
    "remove_process_set",
    "rocm_built",
    "shard",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
    "vars_to_refs",
]

if not TYPE_CHECKING and not is_installed():
    _NAMES = frozenset(__all__)
    __all__ = [name for name in __all__ if name in globals()]
