"""A setting of glibc's malloc that keeps freed memory for the next step.

A gradient is freed as soon as it has been copied to shared memory. The C library may then give the gradient's pages back to the
system, and the next backward pass gets pages again one page fault at a time: 8000 faults, 10 ms, for 32 MB.
"""

from __future__ import annotations

import ctypes
import functools

from hvdlite.config import Config

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES = 2**31 - 1
_MMAP_BYTES = 2**25
"""The largest threshold that glibc allows, in bytes. Larger tensors get newly mapped memory each time."""


def keep_freed_memory(config: Config) -> None:
    """Tell the C library to keep what is freed for the next step, unless the user has set ``HVDLITE_KEEP_MEMORY`` to 0."""
    if config.keep_memory:
        tell_malloc()


@functools.cache  # once in a process
def tell_malloc() -> bool:
    """Tell glibc's malloc not to give memory back to the system between steps. Return whether malloc accepted that."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library, which keeps its own behaviour
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES) and mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))
