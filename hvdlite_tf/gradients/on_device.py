"""TensorFlow's eager tensors on a GPU, as tensors of the library whose streams the exchange uses; and back. No value is copied.

TensorFlow has a stream of its own, which it shows nobody. So the two sides are put in order by the host::

    TensorFlow's stream   … gradients │ to_dlpack waits for it                           │ from_dlpack: uses the results
    ours                                                       pack, sum, divide │ waits │

Results lie in memory of that library. TensorFlow may let go of them while its stream still reads; that is over when the next
exchange begins, which waits for the stream before any memory is used again.
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
"""Bytes. TensorFlow ends the process at a tensor that begins elsewhere (EIGEN_MAX_ALIGN_BYTES)."""


def is_on_gpu(tensor: Any) -> bool:
    """Whether an eager tensor, or a variable, is in a GPU's memory."""
    return ":GPU:" in tensor.device


def device_of(tensors: Sequence[Any]) -> Device | None:
    """Where all of these eager tensors and variables are; None if they are to be exchanged through host memory.

    That is so if one is in host memory; and if neither torch nor CuPy is installed that can use the GPU.
    """
    if not tensors or not all(map(is_on_gpu, tensors)):
        return None
    try:
        return device_registry.device_of(_Lent(read(tensors[0])))
    except DeviceError:
        return None


def wait_for(tensor: Any) -> None:
    """Let the host wait for all that TensorFlow does on the GPU of an eager tensor or variable."""
    tf.experimental.dlpack.to_dlpack(read(tensor))


def borrow(tensor: Any, device: Device) -> Any:
    """An eager tensor as one of `device`, which shares its memory. The host waits for TensorFlow's stream."""
    if tensor.shape.num_elements() == 0:
        return device.empty(tensor.shape.as_list(), tensor.dtype.name)
    return importlib.import_module(device.library).from_dlpack(_Lent(tensor))


def lend(natives: Sequence[Any], device: Device) -> list[Any]:
    """Tensors of `device`, ready on the current stream, as eager tensors that share their memory. The host waits for them."""
    # Halves of which another one begins in the middle of 64 bytes are copied, on the device.
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
    """An eager tensor, as other libraries take what has DLPack: on a stream that TensorFlow has waited for.

    Args:
        tensor: The tensor.
    """

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        found: tuple[int, int] = self._tensor.__dlpack_device__()
        return found

    def __dlpack__(self, **_: Any) -> Any:
        return tf.experimental.dlpack.to_dlpack(self._tensor)
