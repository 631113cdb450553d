"""Computes figures from samples. The import of this module does not start MPI."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

import numpy as np

# Environment variables of Open MPI's launcher with settings that affect the speed.
MPI_SETTINGS = ("OMPI_MCA_mpi_yield_when_idle", "OMPI_MCA_pml", "OMPI_MCA_btl")


def in_turn(names: Sequence[str], turn: int) -> list[str]:
    """Return the order of the peers in a turn: each turn begins with another peer than the one before."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def until_all_are_done(seconds: Sequence[float]) -> list[float]:
    """Return the time of the slowest rank for each measurement. Every rank calls this function."""
    from mpi4py import MPI

    longest = np.array(seconds)
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, longest, MPI.MAX)
    return [float(value) for value in longest]


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the minimum of samples."""
    return {"median": statistics.median(seconds), "minimum": min(seconds), "samples": len(seconds)}


def mpi_in_use() -> dict[str, str]:
    """Return the name of this rank's MPI library, and its settings."""
    from mpi4py import MPI

    library = MPI.Get_library_version().split(",")[0].strip("\0\n ")
    return {"library": library, **{name: os.environ[name] for name in MPI_SETTINGS if name in os.environ}}
