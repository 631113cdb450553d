"""The contracts between the rooms: a module of a higher room names the protocol, never the class behind it.

- `types`: arrays, reductions, what is known of a tensor; `combine`: how NumPy does what a `ReduceOp` says.
- `transport`: messages between two ranks; `channel`: the same with an owner of every wait.
- `collectives`: what all ranks of a group do together.
- `tensors`: how the core reads and makes a framework's tensors; `device`: a kind of device, its memory and its streams.
- `gradients`: what an adapter makes to exchange gradients.
"""

from __future__ import annotations

from hvdlite.protocols.channel import Channel, WaitKind
from hvdlite.protocols.collectives import Collectives
from hvdlite.protocols.combine import Combine, numpy_combine, ufunc_of
from hvdlite.protocols.device import Device, HostMirror, Stream
from hvdlite.protocols.gradients import Exchange, Plan
from hvdlite.protocols.tensors import DeviceAdapter, HalfConverter, TensorAdapter
from hvdlite.protocols.transport import ANY, LARGEST_TAG, Request, Transport
from hvdlite.protocols.types import Array, ReduceOp, TensorInfo

__all__ = [
    "ANY",
    "LARGEST_TAG",
    "Array",
    "Channel",
    "Collectives",
    "Combine",
    "Device",
    "DeviceAdapter",
    "Exchange",
    "HalfConverter",
    "HostMirror",
    "Plan",
    "ReduceOp",
    "Request",
    "Stream",
    "TensorAdapter",
    "TensorInfo",
    "Transport",
    "WaitKind",
    "numpy_combine",
    "ufunc_of",
]
