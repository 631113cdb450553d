"""What the MPI launcher tells a rank through environment variables, and what its compute libraries are told.

The standard library only: guards load this file without the package, see worker.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

THREADS_VARIABLE = "OMP_NUM_THREADS"
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
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


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((int(environ[name]) for name in names if name in environ), None)
