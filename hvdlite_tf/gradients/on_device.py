"""Converts TensorFlow's eager tensors on a GPU to tensors of the library whose streams the exchange uses, and back, by DLPack.

No values are copied. TensorFlow has a stream of its own, which other libraries cannot use. So the host waits for each stream
before the other one continues::

    TensorFlow's stream   … gradients │ to_dlpack waits for it                           │ from_dlpack: uses the results
    ours                                                       pack, sum, divide │ waits │

Results lie in memory of the library. TensorFlow may release a result while its stream still reads it. The next exchange waits
for TensorFlow's stream before it uses any memory again, so it does not overwrite a result that is still read.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.errors import DeviceError
from hvdlite.protocols import Device
from hvdlite.tensors import device_registry
from hvdlite_tf.variables import read

ALIGNMENT = 64
"""Bytes. TensorFlow ends the process if the address of a tensor is not a multiple of this number (EIGEN_MAX_ALIGN_BYTES)."""


def is_on_gpu(tensor: Any) -> bool:
    """Return whether an eager tensor or a variable is in the memory of a GPU."""
    return ":GPU:" in tensor.device


def device_of(tensors: Sequence[Any]) -> Device | None:
    """Return the device of all these eager tensors and variables; None if they must be exchanged through host memory.

    The result is None if there are no tensors, if one is in host memory, or if neither torch nor CuPy can use the GPU.
    """
    if not tensors or not all(map(is_on_gpu, tensors)):
        return None
    try:
        return device_registry.device_of(_Lent(read(tensors[0])))
    except DeviceError:
        return None


def wait_for(tensor: Any) -> None:
    """Let the host wait for all work of TensorFlow on the GPU of an eager tensor or variable."""
    tf.experimental.dlpack.to_dlpack(read(tensor))


def borrow(tensor: Any, device: Device) -> Any:
    """Return an eager tensor as a tensor of `device` with the same memory. The host waits for TensorFlow's stream."""
    if tensor.shape.num_elements() == 0:
        return device.empty(tensor.shape.as_list(), tensor.dtype.name)
    return importlib.import_module(device.library).from_dlpack(_Lent(tensor))


def lend(natives: Sequence[Any], device: Device) -> list[Any]:
    """Return tensors of `device` as eager tensors with the same memory. The host waits until they are ready.

    Args:
        natives: Tensors that are ready on the current stream.
        device: The device of the tensors.
    """
    # A result of halves may begin in the middle of 64 bytes. Such a result is copied, on the device.
    aligned = [
        native if device.pointer(native) % ALIGNMENT == 0 else device.cast(native, device.dtype(native))
        for native in natives
    ]
    device.current().synchronize()
    return [
        tf.experimental.dlpack.from_dlpack(native.__dlpack__(stream=-1))
        if device.count(native)
        else tf.zeros(tuple(native.shape), device.dtype(native))
        for native in aligned
    ]


class _Lent:
    """A wrapper of an eager tensor with the methods of DLPack, from which other libraries make a tensor.

    TensorFlow has waited for its stream when `__dlpack__` returns.

    Args:
        tensor: The eager tensor.
    """

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        found: tuple[int, int] = self._tensor.__dlpack_device__()
        return found

    def __dlpack__(self, **_: Any) -> Any:
        return tf.experimental.dlpack.to_dlpack(self._tensor)
