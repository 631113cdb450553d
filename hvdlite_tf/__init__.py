"""hvdlite for Keras and TensorFlow: ``import hvdlite_tf as hvd``.

The package has the names of Horovod with Horovod's arguments: the one-line wrap for optimizers and tapes, differentiable
operations, callbacks that start all ranks alike; and the names that all packages of hvdlite have (`hvdlite.basics`). Keras on
torch needs no TensorFlow: without it, names that need TensorFlow raise MissingPackageError when a program uses them, and all
other names work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdlite import (
    DistributedGradient,
    allgather_async,
    allreduce_async,
    alltoall_async,
    basics,
    broadcast_async,
    reducescatter_async,
)
from hvdlite.adapter import capabilities
from hvdlite.adapter.arguments import num_rank_is_power_2 as check_num_rank_power_of_2
from hvdlite.adapter.capabilities import *  # noqa: F403
from hvdlite.adapter.few_bytes.local_steps import DiLoCo, LocalSGD
from hvdlite.adapter.guide import advice_for
from hvdlite.async_sgd.training.unfinished import serve_parameters
from hvdlite.basics import *  # noqa: F403
from hvdlite.checks import require
from hvdlite.serving.serve import serve

# These checks come first, because the modules below import the packages.
require("keras", "tf", "hvdlite_tf")
try:
    import keras as _keras  # noqa: F401
except ModuleNotFoundError:  # its backend is not installed
    require("tensorflow", "tf", "hvdlite_tf")
    raise

from hvdlite_tf import callbacks, checkpoint, elastic  # noqa: E402
from hvdlite_tf.async_sgd.optimizer import AsyncDistributedOptimizer  # noqa: E402
from hvdlite_tf.async_sgd.wrapped import AsyncDistributed  # noqa: E402
from hvdlite_tf.callbacks import BroadcastGlobalVariablesCallback  # noqa: E402
from hvdlite_tf.optimizers.wrap import DistributedOptimizer  # noqa: E402
from hvdlite_tf.servable import servable  # noqa: E402
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
    from hvdlite_tf.pipeline.pipeline import Pipeline
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
        raise AttributeError(advice_for(__name__, name))


__all__ = [
    "AsyncDistributed",
    "AsyncDistributedOptimizer",
    "BroadcastGlobalVariablesCallback",
    "BroadcastGlobalVariablesHook",
    "DiLoCo",
    "DistributedGradient",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LocalGradientAggregationHelper",
    "LocalGradientAggregationHelperEager",
    "LocalSGD",
    "PartialDistributedGradientTape",
    "Pipeline",
    "Strategy",
    "SyncBatchNormalization",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "callbacks",
    "check_num_rank_power_of_2",
    "checkpoint",
    "elastic",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "reducescatter_async",
    "refs_to_vars",
    "servable",
    "serve",
    "serve_parameters",
    "shard",
    "size_op",
    "vars_to_refs",
]
__all__ += basics.__all__ + capabilities.__all__

if not TYPE_CHECKING and not is_installed():
    _NAMES = frozenset(__all__)
    __all__ = [name for name in __all__ if name in globals()]

if not TYPE_CHECKING and "__getattr__" not in globals():

    def __getattr__(name: str) -> Any:
        raise AttributeError(advice_for(__name__, name))
