"""Finds the `Device` for arrays on a GPU: that of CuPy for CuPy's arrays, that of torch or CuPy for other arrays by DLPack."""

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

_ON_GPU = {2, 10, 13}
"""DLPack's numbers of CUDA, ROCm and managed CUDA memory (dlpack.h, ``DLDeviceType``)."""


def device_kind(array: Any) -> str | None:
    """Return the `Device.kind` of the memory of an array with DLPack; None for host memory."""
    return "cuda" if int(array.__dlpack_device__()[0]) in _ON_GPU else None


def device_of(array: Any) -> Device:
    """Return the device of an array whose `device_kind` is not None.

    Raises:
        DeviceError: No library that can work on the array is installed.
    """
    index = int(array.__dlpack_device__()[1])
    if type(array).__module__.partition(".")[0] == "cupy":
        return cupy_device_of(index)
    library = _library()
    if library == "cupy":
        return cupy_device_of(index)
    found: Device = framework_adapter("torch").lending_device(index)
    return found


def find_device(kind: str) -> Device:
    """Return the GPU that this process has chosen, as a device of the library that it uses.

    Raises:
        DeviceError: There is no GPU, or no library that can use one.
    """
    if _library() == "cupy":
        cupy = importlib.import_module("cupy")
        return cupy_device_of(int(cupy.cuda.runtime.getDevice()))
    found: Device = framework_adapter("torch").current_device()
    return found


@functools.cache
def _library() -> str:
    """Return "torch" or "cupy": the one that this process has loaded at the first call; else the one that is installed."""
    for present in (sys.modules.__contains__, lambda name: importlib.util.find_spec(name) is not None):
        for name in ("torch", "cupy"):
            if present(name):
                return name
    raise DeviceError(
        "GPU arrays are exchanged by way of torch or CuPy, and neither is installed here: pip install torch, or the CuPy for "
        "your CUDA (cupy-cuda13x)."
    )


def borrow(array: Any) -> Any:
    """Return an array as a tensor of its `device_of`, sharing the memory."""
    if type(array).__module__.partition(".")[0] == "cupy":
        return array
    return importlib.import_module(_library()).from_dlpack(array)


def lend(native: Any, like: Any) -> Any:
    """Return a tensor of a device as an array of the type of `like`, sharing the memory: the reverse of `borrow`."""
    if type(native) is type(like):
        return native
    return like.__array_namespace__().from_dlpack(native)
