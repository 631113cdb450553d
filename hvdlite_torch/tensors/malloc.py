"""Where torch's tensors lie in host memory: in memory that is kept for the next step, and in huge pages.

A gradient is freed as soon as it has been copied to shared memory. The C library may then give the gradient's pages back to the
system, and the next backward pass gets pages again one page fault at a time: 8000 faults, 10 ms, for 32 MB.

glibc keeps blocks of up to 32 MiB. A larger tensor gets new pages in each step whatever glibc is told (unless it may never map
memory, but then blocks of 64 MiB are cut up, and a process took 30 % more). In huge pages of 2 MiB the larger ones cost little,
and the holes between all of them less: steps of BERT-base's size take 10 % less, and those of a layer of 4096 × 4096, 25 %.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools

from hvdlite.config import Config, set_default
from hvdlite.errors import ArgumentError

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


def ask_for_huge_pages() -> None:
    """Let torch ask Linux for huge pages for large tensors, unless the user has set ``HVDLITE_HUGE_PAGES`` to 0.

    torch reads its variable when it makes the first tensor, so this comes with the import.
    """
    with contextlib.suppress(ArgumentError):  # `init` raises it
        if Config.from_env().huge_pages:
            set_default("THP_MEM_ALLOC_ENABLE", "1")
