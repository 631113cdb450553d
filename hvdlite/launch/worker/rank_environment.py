"""The environment of a rank: the variables that the MPI launcher sets, and those that the worker adds.

This file imports only the standard library: guards load it without the package, see worker.py.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping

THREADS_VARIABLE = "OMP_NUM_THREADS"
HOROVOD_VARIABLE = "HVDLITE_HOROVOD"
"""This variable is set if programs import Horovod. For the ranks its value is the number of ranks on each host, as "2,2"."""

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def own_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return the rank of this process, as the MPI launcher's variables say.

    Raises:
        SystemExit: The MPI launcher has set none of these variables.
    """
    rank = find_rank(environ)
    if rank is None:
        names = ", ".join(_RANK_VARIABLES)
        raise SystemExit(f"hvdliterun: the MPI launcher set none of {names}: which rank is this?")
    return rank


def find_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank of this process, or None if no MPI launcher has said it."""
    return _first(environ, _RANK_VARIABLES)


def find_local_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of this process among the ranks of its host, or None if no MPI launcher has said it."""
    return _first(environ, _LOCAL_RANK_VARIABLES)


def share_cores(environ: MutableMapping[str, str] = os.environ) -> int | None:
    """Divide this host's cores among its ranks: set the number of threads that this rank's compute libraries start.

    Otherwise torch or BLAS would start as many threads as there are cores on each rank, and the ranks would take the cores
    from each other. If the user has set OMP_NUM_THREADS, it stays.

    Returns:
        The number of threads; None if the user has set it, or the ranks of this host cannot be counted.
    """
    local_size = _first(environ, _LOCAL_SIZE_VARIABLES)
    if THREADS_VARIABLE in environ or local_size is None:
        return None
    threads = max(1, cores() // local_size)
    environ[THREADS_VARIABLE] = str(threads)
    return threads


def set_horovod_variables(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables in which horovodrun tells a rank its number, such as HOROVOD_RANK, if programs import Horovod.

    hvdliterun fills the hosts in their order. If the MPI launcher was told to place the ranks in another way, the number of
    the host is not known, so HOROVOD_CROSS_RANK and HOROVOD_CROSS_SIZE are not set.
    """
    if HOROVOD_VARIABLE not in environ:
        return
    rank = own_rank(environ)
    counts = [int(count) for count in environ[HOROVOD_VARIABLE].split(",")]
    positions = [(host, local) for host, count in enumerate(counts) for local in range(count)]
    host, local_rank = positions[rank]
    local_size = counts[host]
    seen = _first(environ, _LOCAL_RANK_VARIABLES), _first(environ, _LOCAL_SIZE_VARIABLES)
    values = {"RANK": rank, "SIZE": len(positions), "HOSTNAME": socket.gethostname()}
    if seen == (local_rank, local_size):
        peers = [other for other, count in enumerate(counts) if count > local_rank]
        values |= {"CROSS_RANK": peers.index(host), "CROSS_SIZE": len(peers)}
    if None not in seen:
        values |= {"LOCAL_RANK": seen[0], "LOCAL_SIZE": seen[1]}
    environ.update({f"HOROVOD_{name}": str(value) for name, value in values.items()})


def renumber_horovod_variables(
    rank: int, size: int, local_rank: int, local_size: int, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set these variables anew, if they are there, because other ranks of the job have failed.

    Args:
        rank, size, local_rank, local_size: The numbers of this rank among those that are left, which are on one host.
        environ: The environment.
    """
    if HOROVOD_VARIABLE in environ:
        values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
        environ.update({f"HOROVOD_{name}": str(value) for name, value in values.items()})


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((int(environ[name]) for name in names if name in environ), None)
