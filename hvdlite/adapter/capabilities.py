"""The functions of Horovod that return which libraries can be used.

Nothing is compiled when hvdlite is installed, so these functions search for the libraries when they are called. They do not
check for a GPU; ``torch.cuda.is_available()`` does.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from hvdlite.comm.gpu import nccl
from hvdlite.config import Config
from hvdlite.errors import DeviceError

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "nccl_built",
    "rocm_built",
]


def mpi_built() -> bool:
    """Return whether MPI can be used: mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Return whether the ranks communicate by MPI. They do, if MPI can be used."""
    return mpi_built()


def gloo_built() -> bool:
    """Return False, because hvdlite does not use Gloo.

    Examples:
        >>> hvd.gloo_built()
        False
    """
    return False


def gloo_enabled() -> bool:
    """Return False, because hvdlite does not use Gloo.

    Examples:
        >>> hvd.gloo_enabled()
        False
    """
    return False


@functools.cache
def nccl_built() -> int:
    """Return the version of NCCL (or RCCL) that exchanges GPU tensors, such as 22809 for 2.28.9; 0 if none can be loaded."""
    try:
        library = nccl.load(Config.from_env().nccl_library)
    except DeviceError:
        return 0
    return 0 if library is None else library.version


def ddl_built() -> bool:
    """Return False, because hvdlite does not use IBM's DDL.

    Examples:
        >>> hvd.ddl_built()
        False
    """
    return False


def ccl_built() -> bool:
    """Return False, because hvdlite does not use oneCCL.

    Examples:
        >>> hvd.ccl_built()
        False
    """
    return False


def cuda_built() -> bool:
    """Return whether torch for CUDA or CuPy is installed. Its tensors can then be exchanged on the GPU."""
    return _torch_version().cuda is not None or (importlib.util.find_spec("cupy") is not None and not rocm_built())


def rocm_built() -> bool:
    """Return whether torch for ROCm is installed. Its tensors can then be exchanged on the GPU."""
    return _torch_version().hip is not None


def _torch_version() -> Any:
    """Return ``torch.version`` without importing torch. The file of that module contains only constants."""
    if "torch" in sys.modules:
        return sys.modules["torch"].version
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return SimpleNamespace(cuda=None, hip=None)
    path = Path(spec.origin).with_name("version.py")
    module = ModuleType("torch.version")
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module
