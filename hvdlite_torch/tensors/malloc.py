"""Keeping freed memory for the next step.

A gradient is freed as soon as it has been copied to shared memory. The C library may then give its pages back to the
system, and the next backward pass gets them again one page fault at a time: 8000 faults, 10 ms, for 32 MB.
"""

from __future__ import annotations

import ctypes
import functools

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES = 2**31 - 1
_MMAP_BYTES = 2**25
"""The most that glibc takes. Larger tensors are mapped anew each time, as they always are."""


@functools.cache  # once for the process
def keep_freed_memory() -> bool:
    """Tell glibc's malloc not to give memory back between steps. Returns whether it listens."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library: whatever it does is what happens
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES) and mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))
