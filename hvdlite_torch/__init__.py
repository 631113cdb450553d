"""hvdlite for PyTorch: ``import hvdlite_torch as hvd``.

The package has the names of ``horovod.torch`` with Horovod's arguments: the one-line wrap for optimizers, operations of which
the blocking ones are differentiable, functions for training scripts; and the names that all packages of hvdlite have
(`hvdlite.basics`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdlite import basics
from hvdlite.adapter import capabilities
from hvdlite.adapter.capabilities import *  # noqa: F403
from hvdlite.api import at_the_end
from hvdlite.async_sgd.training.unfinished import serve_parameters

if TYPE_CHECKING:  # mypy keeps the first of two imports of a name
    from hvdlite_torch.distributed.backend import init as init
    from hvdlite_torch.distributed.grid import ProcessGrid as ProcessGrid

from hvdlite.adapter.guide import advice_for
from hvdlite.basics import *  # type: ignore[assignment]  # noqa: F403
from hvdlite.checks import require
from hvdlite.gradients.aggregator import Aggregator, FlatBucket, Weights
from hvdlite.serving.serve import serve

# This check comes first, because the modules below import torch.
require("torch", "torch", "hvdlite_torch")

from hvdlite_torch.tensors.malloc import ask_for_huge_pages  # noqa: E402

# torch decides with its first tensor how memory is allocated, and some of the modules below may make one.
ask_for_huge_pages()

from hvdlite.adapter.few_bytes.local_steps import DiLoCo, LocalSGD  # noqa: E402
from hvdlite_torch import checkpoint, elastic  # noqa: E402
from hvdlite_torch.async_sgd.optimizer import AsyncDistributedOptimizer  # noqa: E402
from hvdlite_torch.async_sgd.wrapped import AsyncDistributed  # noqa: E402
from hvdlite_torch.checks import alone  # noqa: E402
from hvdlite_torch.distributed import backend  # noqa: E402
from hvdlite_torch.distributed.backend import init as init  # noqa: E402
from hvdlite_torch.distributed.grid import ProcessGrid as ProcessGrid  # noqa: E402
from hvdlite_torch.ops.allgather import allgather, allgather_async, grouped_allgather, grouped_allgather_async  # noqa: E402
from hvdlite_torch.ops.allreduce import (  # noqa: E402
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from hvdlite_torch.ops.alltoall import alltoall, alltoall_async  # noqa: E402
from hvdlite_torch.ops.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_  # noqa: E402
from hvdlite_torch.ops.handles import poll, synchronize  # noqa: E402
from hvdlite_torch.ops.join import barrier, join, uneven  # noqa: E402
from hvdlite_torch.ops.reducescatter import (  # noqa: E402
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from hvdlite_torch.ops.sparse import sparse_allreduce_async  # noqa: E402
from hvdlite_torch.optimizer import DistributedOptimizer  # noqa: E402
from hvdlite_torch.pipeline.pipeline import Pipeline  # noqa: E402
from hvdlite_torch.pipeline.wavefront import Wavefront  # noqa: E402
from hvdlite_torch.servable import servable  # noqa: E402
from hvdlite_torch.slicing.slice_layers import slice_layers  # noqa: E402
from hvdlite_torch.step.own_parameters import own_parameters  # noqa: E402
from hvdlite_torch.step.wrapped import Distributed  # noqa: E402
from hvdlite_torch.training.in_sync import assert_in_sync, rank_zero_only  # noqa: E402
from hvdlite_torch.training.large_batch import scale_lr, warmup  # noqa: E402
from hvdlite_torch.training.state import (  # noqa: E402
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvdlite_torch.training.sync_batch_norm import SyncBatchNorm  # noqa: E402

at_the_end.append(alone.look)
backend.register()

__all__ = [
    "Aggregator",
    "AsyncDistributed",
    "AsyncDistributedOptimizer",
    "DiLoCo",
    "Distributed",
    "DistributedOptimizer",
    "FlatBucket",
    "LocalSGD",
    "Pipeline",
    "SyncBatchNorm",
    "Wavefront",
    "Weights",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "assert_in_sync",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "checkpoint",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "own_parameters",
    "poll",
    "rank_zero_only",
    "reducescatter",
    "reducescatter_async",
    "scale_lr",
    "servable",
    "serve",
    "serve_parameters",
    "slice_layers",
    "sparse_allreduce_async",
    "synchronize",
    "uneven",
    "warmup",
]
__all__ += basics.__all__ + capabilities.__all__

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise AttributeError(advice_for(__name__, name))
