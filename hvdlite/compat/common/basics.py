"""``horovod.common.basics`` has the functions that every framework's module has, as the methods of one object."""

from __future__ import annotations

from typing import Any

from hvdlite import api
from hvdlite.adapter import capabilities


class HorovodBasics:
    """The rank of this process, and what hvdlite can use here. All objects of this class behave alike.

    Args:
        pkg_path: Ignored, like all further arguments: Horovod looks for its compiled library there, and hvdlite has none.
    """

    def __init__(self, pkg_path: str, *args: Any) -> None:
        self.pkg_path = pkg_path

    init = staticmethod(api.init)
    shutdown = staticmethod(api.shutdown)
    is_initialized = staticmethod(api.is_initialized)
    start_timeline = staticmethod(api.start_timeline)
    stop_timeline = staticmethod(api.stop_timeline)
    size = staticmethod(api.size)
    local_size = staticmethod(api.local_size)
    cross_size = staticmethod(api.cross_size)
    rank = staticmethod(api.rank)
    local_rank = staticmethod(api.local_rank)
    cross_rank = staticmethod(api.cross_rank)
    is_homogeneous = staticmethod(api.is_homogeneous)
    mpi_threads_supported = staticmethod(api.mpi_threads_supported)
    mpi_enabled = staticmethod(capabilities.mpi_enabled)
    mpi_built = staticmethod(capabilities.mpi_built)
    gloo_enabled = staticmethod(capabilities.gloo_enabled)
    gloo_built = staticmethod(capabilities.gloo_built)
    nccl_built = staticmethod(capabilities.nccl_built)
    ddl_built = staticmethod(capabilities.ddl_built)
    ccl_built = staticmethod(capabilities.ccl_built)
    cuda_built = staticmethod(capabilities.cuda_built)
    rocm_built = staticmethod(capabilities.rocm_built)
