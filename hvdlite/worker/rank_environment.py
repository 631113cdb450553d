"""What the MPI launcher tells a rank through environment variables, and what its compute libraries are told.

The standard library only: guards load this file without the package, see worker.py.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping

THREADS_VARIABLE = "OMP_NUM_THREADS"
HOROVOD_VARIABLE = "HVDLITE_HOROVOD"
"""Set where programs import Horovod; for the ranks, its value is the number of ranks of each host, such as "2,2"."""

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def own_rank(environ: Mapping[str, str] = os.environ) -> int:
    """The rank that this process is."""
    rank = _first(environ, _RANK_VARIABLES)
    if rank is None:
        names = ", ".join(_RANK_VARIABLES)
        raise SystemExit(f"hvdliterun: the MPI launcher set none of {names}: which rank is this?")
    return rank


def share_cores(environ: MutableMapping[str, str] = os.environ) -> int | None:
    """Divide this host's cores among its ranks, as the number of threads that compute libraries start.

    Each rank's torch or BLAS would start as many threads as there are cores, and they would take the
    cores from each other. What the user has set stays.

    Returns:
        This rank's share; None if the user decides, or the ranks of this host cannot be counted.
    """
    local_size = _first(environ, _LOCAL_SIZE_VARIABLES)
    if THREADS_VARIABLE in environ or local_size is None:
        return None
    threads = max(1, cores() // local_size)
    environ[THREADS_VARIABLE] = str(threads)
    return threads


def show_place(environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell a program that imports Horovod its place in the variables where horovodrun tells it. Others are told nothing.

    Hosts are filled in their order. Where the MPI launcher was told to place ranks in another way, the number of the host is
    not known, and HOROVOD_CROSS_RANK and HOROVOD_CROSS_SIZE are not set.
    """
    if HOROVOD_VARIABLE not in environ:
        return
    rank = own_rank(environ)
    counts = [int(count) for count in environ[HOROVOD_VARIABLE].split(",")]
    places = [(host, local) for host, count in enumerate(counts) for local in range(count)]
    host, local_rank = places[rank]
    local_size = counts[host]
    seen = _first(environ, _LOCAL_RANK_VARIABLES), _first(environ, _LOCAL_SIZE_VARIABLES)
    place = {"RANK": rank, "SIZE": len(places), "HOSTNAME": socket.gethostname()}
    if seen == (local_rank, local_size):
        peers = [other for other, count in enumerate(counts) if count > local_rank]
        place |= {"CROSS_RANK": peers.index(host), "CROSS_SIZE": len(peers)}
    if None not in seen:
        place |= {"LOCAL_RANK": seen[0], "LOCAL_SIZE": seen[1]}
    environ.update({f"HOROVOD_{name}": str(value) for name, value in place.items()})


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((int(environ[name]) for name in names if name in environ), None)
