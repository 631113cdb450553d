"""Parameters of a module that lie in a file in memory, which the replicas of a server share."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections import Counter

import torch

_SMALL = 2**16
"""Parameters of fewer bytes stay where they are."""


def share(module: torch.nn.Module, descriptor: int) -> int:
    """Let those parameters of a module lie in a file that are equal to what is there, and return how many bytes these are.

    The first process that calls this writes its parameters, and seals the file: nobody can change it any more. A parameter that
    is different stays where it is. What a process writes to a parameter is its own (copy on write).

    Args:
        module: The module. Only dense parameters of the CPU that own their memory are shared.
        descriptor: A file of `os.memfd_create`, empty at first, with seals allowed. Another process may call this too, with the
            same file.
    """
    parameters = _sharable(module)
    sizes = [parameter.nbytes for parameter in parameters]
    if not sizes:
        return 0
    fcntl.lockf(descriptor, fcntl.LOCK_EX)  # the end of a process releases it
    try:
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
            _write(descriptor, parameters)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN)
    if os.fstat(descriptor).st_size != sum(map(_room, sizes)):
        return 0  # another module
    memory = mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    begin = shared = 0
    for parameter, size in zip(parameters, sizes, strict=True):
        theirs = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=begin)
        if torch.equal(theirs, _bytes(parameter)):
            parameter.data = theirs.view(parameter.dtype).view(parameter.shape)
            shared += size
        begin += _room(size)
    ctypes.CDLL(None).malloc_trim(0)  # what the parameters had is given back to the system
    return shared


def _sharable(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that nothing else has a view of, as far as the module's own parameters and buffers show it."""
    dense = [
        each
        for each in (*module.parameters(), *module.buffers())
        if type(each.data) is torch.Tensor and each.layout is torch.strided and each.device.type == "cpu"
    ]
    owners = Counter(each.untyped_storage().data_ptr() for each in dense)
    return [
        each
        for each in dense
        if type(each) is torch.nn.Parameter
        and each.is_contiguous()
        and not each.is_quantized
        and each.nbytes == each.untyped_storage().nbytes() >= _SMALL
        and owners[each.untyped_storage().data_ptr()] == 1
    ]


def _write(descriptor: int, parameters: list[torch.nn.Parameter]) -> None:
    os.ftruncate(descriptor, sum(_room(parameter.nbytes) for parameter in parameters))
    begin = 0
    for parameter in parameters:
        rest = _bytes(parameter).numpy().data
        place = begin
        while rest:  # one call writes 2 GiB at most
            count = os.pwrite(descriptor, rest, place)
            rest, place = rest[count:], place + count
        begin += _room(parameter.nbytes)


def _bytes(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter.detach().reshape(-1).view(torch.uint8)


def _room(size: int) -> int:
    """Return how many bytes a parameter takes in the file: whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
