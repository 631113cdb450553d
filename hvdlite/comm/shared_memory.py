"""Memory that all ranks of one host see.

The memory has no name in any file system (memfd). So it takes no space in /dev/shm, and the kernel frees it when its last
process ends, however that process ends. The first rank makes the memory, and the others open it through ``/proc/<pid>/fd``.
They compare a random number in the memory with the number that the first rank sent: in another container the same path may
be another file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import weakref

import numpy as np

from hvdlite.errors import HvdliteError
from hvdlite.protocols import Array, Transport

PAGE = 4096
_MAP_FIXED = 0x10
"""Linux' flag for mmap. Python's mmap has no name for it."""

_MADE, _NO_MEMFD, _NO_MEMORY, _UNREACHABLE = range(4)
_REASONS = {
    _NO_MEMFD: "this system has no memfd (Linux has)",
    _NO_MEMORY: "the kernel gave no memory for it",
    _UNREACHABLE: "ranks of this host cannot see each other's processes in /proc (containers of their own?)",
}


class SharedMemoryError(HvdliteError):
    """The ranks of a host cannot share memory. All of them raise this error."""


def share(transport: Transport, nbytes: int) -> Array:
    """Make memory that all ranks of `transport` see. The ranks are on one host, and all of them call this.

    Args:
        transport: A transport over the ranks. Nobody else may send on it until this function returns.
        nbytes: The size in bytes, the same on every rank.

    Returns:
        An array of `nbytes` uint8 zeros, which begins at a page.

    Raises:
        SharedMemoryError: The ranks cannot share memory. All of them raise it.
    """
    total = PAGE + nbytes  # the first page is for the random number
    descriptor, status = -1, _MADE
    ticket = np.zeros(4, np.int64)  # status, process, descriptor, random number
    if transport.rank == 0:
        try:
            descriptor = os.memfd_create("hvdlite")
            os.ftruncate(descriptor, total)
        except AttributeError:
            status = _NO_MEMFD
        except OSError:
            status = _NO_MEMORY
        ticket[:] = status, os.getpid(), descriptor, secrets.randbits(62)
        if status == _MADE:
            os.pwrite(descriptor, ticket[3:].tobytes(), 0)
        for other in range(1, transport.size):
            transport.send(ticket, other)
    else:
        transport.recv(ticket, 0)
        status = int(ticket[0])
        if status == _MADE:
            try:
                descriptor = os.open(f"/proc/{ticket[1]}/fd/{ticket[2]}", os.O_RDWR)
                if os.pread(descriptor, 8, 0) != ticket[3:].tobytes():
                    status = _UNREACHABLE
            except OSError:
                status = _UNREACHABLE
    memory = None
    if status == _MADE:
        try:
            memory = mmap.mmap(descriptor, total)
        except OSError:
            status = _NO_MEMORY
    status = _worst(transport, status)  # after this, every rank has opened the memory
    if memory is None or status != _MADE:
        if descriptor >= 0:
            os.close(descriptor)
        raise SharedMemoryError(f"the ranks of a host cannot share memory: {_REASONS[status]}.")
    whole = np.frombuffer(memory, np.uint8)
    address = whole.ctypes.data
    _mapped[address] = total, descriptor
    # Not a finalizer of `memory`: that runs after the unmapping, when another thread may have mapped something at this address.
    weakref.finalize(whole, _forget, address)
    return whole[PAGE:]


_mapped: dict[int, tuple[int, int]] = {}
"""For the address of each shared memory of this process: its size in bytes, and its file descriptor."""


def _forget(address: int) -> None:
    _, descriptor = _mapped.pop(address)
    os.close(descriptor)


def _keep_for_itself() -> None:
    """Give a forked child private copies of the shared memory: the ranks do not see what the child writes."""
    if not _mapped:
        return
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    for address, (nbytes, descriptor) in _mapped.items():
        flags = mmap.MAP_PRIVATE | _MAP_FIXED
        if call(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) != address:
            os.abort()  # the child would write to the memory of the ranks


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_for_itself)


def _worst(transport: Transport, status: int) -> int:
    """Return the largest status of all ranks."""
    mine = np.array([status], np.int64)
    if transport.rank == 0:
        other = np.zeros(1, np.int64)
        for rank in range(1, transport.size):
            transport.recv(other, rank)
            np.maximum(mine, other, out=mine)
        for rank in range(1, transport.size):
            transport.send(mine, rank)
    else:
        transport.send(mine, 0)
        transport.recv(mine, 0)
    return int(mine[0])
