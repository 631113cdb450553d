"""The names of `hvdlite` itself, beside those of `hvdlite.basics`: operations on arrays and tensors of every framework."""

from __future__ import annotations

from hvdlite.adapter.distributed_gradient import DistributedGradient
from hvdlite.api import (
    allgather,
    allgather_async,
    allgather_object,
    allgather_object_async,
    allreduce,
    allreduce_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_async,
    broadcast_object,
    broadcast_object_async,
    join,
    reducescatter,
    reducescatter_async,
)
from hvdlite.tensors.registry import register_adapter

__all__ = [
    "DistributedGradient",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allgather_object_async",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "broadcast_object_async",
    "join",
    "reducescatter",
    "reducescatter_async",
    "register_adapter",
]
