"""The contracts between the rooms. A module of another room names the protocol, and not the class behind it.

- `types`: arrays, the op of a reduction, also by NumPy, and the dtype and shape of a tensor.
- `transport`: messages between two ranks; `channel`: such messages with an owner of every wait.
- `collectives`: operations of a whole group on host memory.
- `tensors`: how the core reads and makes a framework's tensors; `device`: an accelerator with its memory and its streams.
- `gradients`: the object that an adapter makes to exchange gradients, and the plan of an exchange.
"""

from __future__ import annotations

from hvdlite.protocols.channel import Channel, WaitKind
from hvdlite.protocols.collectives import Collectives
from hvdlite.protocols.device import Device, HostMirror, Stream
from hvdlite.protocols.gradients import Exchange, Plan
from hvdlite.protocols.tensors import DeviceAdapter, HalfConverter, TensorAdapter
from hvdlite.protocols.transport import ANY, LARGEST_TAG, Request, Transport
from hvdlite.protocols.types import Array, Combine, ReduceOp, TensorInfo, numpy_combine, ufunc_of

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
