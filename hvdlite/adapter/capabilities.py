"""What hvdlite can use here, as Horovod's programs ask for it.

Nothing is compiled when hvdlite is installed, so these look for what is there when they are called. Whether there is a GPU is
another question: ``torch.cuda.is_available()``.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from hvdlite.config import Config
from hvdlite.errors import DeviceError
from hvdlite.gpu import nccl

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


@functools.cache
def nccl_built() -> int:
    """The version of NCCL (or RCCL) that GPU tensors are exchanged by, such as 22809 for 2.28.9; 0 if none can be loaded."""
    try:
        library = nccl.load(Config.from_env().nccl_library)
    except DeviceError:
        return 0
    return 0 if library is None else library.version


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Whether a torch for CUDA, or CuPy, is installed, whose tensors can be exchanged where they are."""
    return _torch_version().cuda is not None or (importlib.util.find_spec("cupy") is not None and not rocm_built())


def rocm_built() -> bool:
    """Whether a torch for ROCm is installed, whose tensors can be exchanged where they are."""
    return _torch_version().hip is not None


def _torch_version() -> Any:
    """``torch.version``, without importing torch: the file holds constants only."""
    if "torch" in sys.modules:
        return sys.modules["torch"].version
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return SimpleNamespace(cuda=None, hip=None)
    path = Path(spec.origin).with_name("version.py")
    module = ModuleType("torch.version")
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module
