"""The ways that this system allows for the memory of gradients. Where one is not allowed, hvdlite takes the next best."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path
from typing import NamedTuple

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Linux writes here whether programs get huge pages: ``always [madvise] never``."""

ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")
"""Whether processes see the writes of another one in the order in which it made them."""


class Way(NamedTuple):
    """What one kind of memory is like here.

    Attributes:
        best: Whether it is the fastest way.
        name: What the memory is for.
        found: What was found, and what follows from it.
    """

    best: bool
    name: str
    found: str


def memory_ways() -> list[Way]:
    """Return the ways that ranks on this host take."""
    return [_shared(), _meetings(), _huge_pages(), _kept()]


def _shared() -> Way:
    name = "gradients of the ranks of a host"
    try:
        descriptor = os.memfd_create("hvdlite")
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            os.close(os.open(f"/proc/{os.getpid()}/fd/{descriptor}", os.O_RDWR))
        finally:
            os.close(descriptor)
    except (AttributeError, OSError) as error:
        return Way(False, name, f"sent by messages: this system gives no memory that processes share ({error})")
    return Way(True, name, "in memory that they share (memfd)")


def _meetings() -> Way:
    name = "meetings of the ranks of a host"
    if ORDERED:
        return Way(True, name, "in the shared memory")
    return Way(False, name, f"by messages: {platform.machine()} does not keep the order of writes")


def _huge_pages() -> Way:
    name = "pages of torch's tensors of 2 MiB and more"
    try:
        text = HUGE_PAGES.read_text()
    except OSError:
        return Way(False, name, f"small ones: this kernel has no {HUGE_PAGES}")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen not in ("always", "madvise"):
        return Way(False, name, f"small ones: {HUGE_PAGES} says {chosen or text.strip()!r}. With madvise they are huge")
    return Way(True, name, f"huge ones ({chosen})")


def _kept() -> Way:
    name = "memory that a step frees"
    try:
        there = hasattr(ctypes.CDLL(None), "mallopt")
    except OSError:
        there = False
    if there and platform.libc_ver()[0] == "glibc":
        return Way(True, name, "kept for the next step (glibc)")
    return Way(False, name, "goes back to the system: only glibc can keep it")
