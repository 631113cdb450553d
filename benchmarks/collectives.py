"""The peers of the allreduce benchmark: each sums one tensor over the ranks, in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from mpi4py import MPI

import hvdlite
from benchmarks.backends import NO_HOROVOD
from benchmarks.plan import BUCKETS, KINDS, MEMCPY, MPI_HALF, MPI_OWN
from hvdlite.algorithms import ALGORITHMS
from hvdlite.api import world
from hvdlite_torch.tensors.adapter import ADAPTER

DTYPES: dict[str, torch.dtype] = {kind: getattr(torch, kind.removesuffix(" NumPy")) for kind in KINDS}
"""The torch dtype of each kind, also of the kind of NumPy arrays."""

# On one host "auto" is "shared_memory". The parameter server is left out: rank 0 does all the work, and hvdlite never
# chooses this algorithm.
NAMED_ALGORITHMS = tuple(name for name in ("mpi", *ALGORITHMS) if name != "parameter_server")


@dataclass
class Peer:
    """One way to sum a tensor, with the memory in which it sums.

    Attributes:
        data: The array that is filled before each call, and holds the sum after the call if `is_sum`.
        call: Sums the array, and returns when the sum is complete.
        is_sum: Whether `call` sums. False for memcpy, which only copies bytes and is a lower bound of the time.
    """

    data: torch.Tensor
    call: Callable[[], object]
    is_sum: bool = True


def peers(kind: str, elements: int, horovod: ModuleType | None) -> tuple[dict[str, Peer], dict[str, str]]:
    """Return the peers that can sum a tensor of `elements` elements of a kind in `plan.KINDS`.

    Every rank calls this function, after `start_gloo`.

    Returns:
        The peers by name, and the reasons why others are missing.
    """
    comm = MPI.COMM_WORLD
    dtype = DTYPES[kind]
    is_half = dtype.itemsize == 2
    data = torch.empty(elements, dtype=dtype)
    user = data.numpy() if kind.endswith("NumPy") else data
    full = torch.empty(elements) if is_half else data
    wide = full.numpy()

    found = {"hvdlite": Peer(data, lambda: hvdlite.allreduce(user, hvdlite.Sum, inplace=True))}
    skipped: dict[str, str] = {}
    if kind == "float32":
        found |= {f"hvdlite {name}": _hvdlite_by(name, data) for name in NAMED_ALGORITHMS}
    if user is data:
        found[BUCKETS] = _buckets(data)
    found[MPI_OWN] = Peer(full, lambda: comm.Allreduce(MPI.IN_PLACE, wide, MPI.SUM))
    if is_half:
        mpi_type = MPI.FLOAT16_T if dtype is torch.float16 else MPI.BFLOAT16_T
        if mpi_type == MPI.DATATYPE_NULL:
            skipped[MPI_HALF] = f"this MPI has no {kind}"
        else:
            bits = data.view(torch.uint16).numpy()
            found[MPI_HALF] = Peer(data, lambda: comm.Allreduce(MPI.IN_PLACE, [bits, mpi_type], MPI.SUM))
    found["torch gloo"] = Peer(data, lambda: torch.distributed.all_reduce(data))
    if horovod is None:
        skipped["Horovod"] = NO_HOROVOD
    else:
        found["Horovod"] = Peer(data, lambda: horovod.allreduce_(data, op=horovod.Sum))
    source, target = data.view(torch.uint8).numpy(), np.empty(data.nbytes, np.uint8)
    found[MEMCPY] = Peer(data, lambda: np.copyto(target, source), is_sum=False)
    return found, skipped


def _hvdlite_by(algorithm: str, data: torch.Tensor) -> Peer:
    return Peer(data, lambda: hvdlite.allreduce(data, hvdlite.Sum, inplace=True, algorithm=algorithm))


def _buckets(data: torch.Tensor) -> Peer:
    """Return the peer that sums a tensor as a gradient is summed: in the buffer of a bucket."""
    reducer = world().group().reducers.make([ADAPTER.info(data)], hvdlite.Sum)
    memory = torch.from_numpy(reducer.memory_of(0)).view(data.dtype)
    return Peer(memory, lambda: reducer.exchange([True]))
