"""Finds the `Device` that works on an array: CuPy's for CuPy's arrays, torch's or CuPy's for others (JAX), by DLPack."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any

from hvdlite.errors import DeviceError
from hvdlite.protocols import Device
from hvdlite.tensors.cupy_device import cupy_device_of
from hvdlite.tensors.frameworks import framework_adapter
from hvdlite.tensors.held import Held

_lent = Held()  # tensors that JAX copies
_ON_GPU = {2, 10, 13}
"""DLPack's numbers for CUDA, ROCm and managed CUDA memory (dlpack.h, ``DLDeviceType``)."""


def namespace_of(array: Any) -> Any:
    """Return the module with the array API's functions for an array; None if its library has none.

    CuPy has these functions in its module, but its arrays do not name the module (seen in CuPy 14.2).
    """
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return importlib.import_module("cupy") if _is_of_cupy(array) else None


def _is_of_cupy(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] == "cupy"


def device_kind(array: Any) -> str | None:
    """Return the `Device.kind` of an array with DLPack; None if the array is in host memory."""
    return "cuda" if int(array.__dlpack_device__()[0]) in _ON_GPU else None


def device_of(array: Any) -> Device:
    """Return the device that works on an array for which `device_kind` is not None.

    Raises:
        DeviceError: Neither torch nor CuPy is installed.
    """
    index = int(array.__dlpack_device__()[1])
    if _is_of_cupy(array):
        return cupy_device_of(index)
    library = _library()
    if library == "cupy":
        return cupy_device_of(index)
    found: Device = framework_adapter("torch").lending_device(index)
    return found


def find_device(kind: str) -> Device:
    """Return the current GPU of torch or CuPy, whichever this process uses.

    Raises:
        DeviceError: There is no GPU, or neither torch nor CuPy is installed.
    """
    if _library() == "cupy":
        cupy = importlib.import_module("cupy")
        return cupy_device_of(int(cupy.cuda.runtime.getDevice()))
    found: Device = framework_adapter("torch").current_device()
    return found


@functools.cache
def _library() -> str:
    """Return "torch" or "cupy": the one that was loaded at the first call; if none was, the one that is installed."""
    for present in (sys.modules.__contains__, lambda name: importlib.util.find_spec(name) is not None):
        for name in ("torch", "cupy"):
            if present(name):
                return name
    raise DeviceError(
        "GPU arrays are exchanged by way of torch or CuPy, and neither is installed here: pip install torch, or the CuPy for "
        "your CUDA (cupy-cuda13x)."
    )


def to_native(array: Any) -> Any:
    """Return an array as a tensor of its device (`device_of`), which shares the memory of the array."""
    if _is_of_cupy(array):
        return array
    return importlib.import_module(_library()).from_dlpack(array)


def from_native(native: Any, like: Any) -> Any:
    """Return a tensor of a device as an array of the library of `like`. This is the reverse of `to_native`.

    JAX gets a copy. It gives memory back as soon as the host has enqueued what reads it, and torch would then write to this
    memory on a stream of which JAX knows nothing. The tensor is kept until the copy is there.
    """
    if type(native) is type(like):
        return native
    device = device_of(like)
    with device.on(device.current()):  # torch exports only what lies on the current GPU
        if type(like).__module__.partition(".")[0] not in ("jax", "jaxlib"):
            return namespace_of(like).from_dlpack(native)
        # from_dlpack(copy=True) is "UNIMPLEMENTED" by JAX 0.11 on a GPU.
        copy = namespace_of(like).array(namespace_of(like).from_dlpack(native), copy=True)
    _lent.until(copy, native, lambda array: array.is_ready())
    return copy
