"""Which `Device` works on arrays of other libraries: CuPy's on its own, torch's or CuPy's on those lent by DLPack (JAX)."""

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
    """`Device.kind` of where an array with DLPack lies; None for host memory."""
    return "cuda" if int(array.__dlpack_device__()[0]) in _ON_GPU else None


def device_of(array: Any) -> Device:
    """What works on an array of which `device_kind` is not None.

    Raises:
        DeviceError: Nothing that could is installed.
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
    """The GPU that this process has chosen, by the library that it uses.

    Raises:
        DeviceError: There is none, or no library that knows.
    """
    if _library() == "cupy":
        cupy = importlib.import_module("cupy")
        return cupy_device_of(int(cupy.cuda.runtime.getDevice()))
    found: Device = framework_adapter("torch").current_device()
    return found


@functools.cache
def _library() -> str:
    """torch or cupy: the one that this process had loaded when this was asked first; else the one that is installed."""
    for present in (sys.modules.__contains__, lambda name: importlib.util.find_spec(name) is not None):
        for name in ("torch", "cupy"):
            if present(name):
                return name
    raise DeviceError(
        "GPU arrays are exchanged by way of torch or CuPy, and neither is installed here: pip install torch, or the CuPy for "
        "your CUDA (cupy-cuda13x)."
    )


def borrow(array: Any) -> Any:
    """An array as a tensor of `device_of`, which shares its memory."""
    if type(array).__module__.partition(".")[0] == "cupy":
        return array
    return importlib.import_module(_library()).from_dlpack(array)


def lend(native: Any, like: Any) -> Any:
    """The reverse of `borrow`: an array of the kind of `like`."""
    if type(native) is type(like):
        return native
    return like.__array_namespace__().from_dlpack(native)
