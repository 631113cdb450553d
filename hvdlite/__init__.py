"""Data-parallel training in one line, over MPI.

``import hvdlite`` loads no framework and does not start MPI; `init` starts it. The functions here take NumPy arrays, tensors of
torch and TensorFlow, and arrays with DLPack, and return arrays of the same kind. `hvdlite.basics` lists the names that all
packages of hvdlite have.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hvdlite import basics
from hvdlite.adapter import guide
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
from hvdlite.basics import *  # noqa: F403
from hvdlite.tensors.registry import register_adapter

if TYPE_CHECKING:
    from hvdlite.launch.run_function import run

__version__ = "0.1.0"

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
    "run",
]
__all__ += basics.__all__


def __getattr__(name: str) -> Any:
    if name == "run":  # a training process does not import the launcher
        return importlib.import_module("hvdlite.launch.run_function").run
    if name.startswith("__"):  # Python and its tools ask for many of these
        raise AttributeError(f"module 'hvdlite' has no attribute {name!r}")
    raise AttributeError(guide.advice_on(name))


guide.install()
