"""What this version of hvdlite can use, as Horovod's programs ask for it.

Nothing is compiled when hvdlite is installed, so these say what its own code uses, whatever else the machine has.
``hvdliterun --check-build`` lists what is installed.
"""

from __future__ import annotations

import importlib.util


def mpi_built() -> bool:
    """Whether MPI can be used: mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether ranks speak by MPI. They do, wherever it can be used."""
    return mpi_built()


def gloo_built() -> bool:
    """False: Gloo is not used."""
    return False


def gloo_enabled() -> bool:
    """False: Gloo is not used."""
    return False


def nccl_built() -> int:
    """0, the version of NCCL: it is not used, for tensors have to be in host memory."""
    return 0


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """False: tensors have to be in host memory."""
    return False


def rocm_built() -> bool:
    """False: tensors have to be in host memory."""
    return False
