"""``horovod.common.basics`` has the functions that every framework's module has, as the methods of one object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hvdlite import api
from hvdlite.adapter import capabilities
from hvdlite.errors import ArgumentError
from hvdlite.ranks.process_set import ProcessSet

__all__ = ["init"]


def init(
    comm: Sequence[int] | Any | None = None, process_sets: Iterable[ProcessSet | Iterable[int]] | str | None = None
) -> None:
    """Join the job, and add process sets. See `hvdlite.init` for the arguments.

    As with Horovod, the job has begun even if the process sets are refused: ``size()`` works, and the sets before the refused
    one stay in effect. A later `init` may name sets of the same ranks again: they are the same sets.

    Raises:
        ArgumentError: A set is there twice, or has all ranks or an unknown one.
        HvdliteError: See `hvdlite.init`.
    """
    api.init(comm, process_sets if isinstance(process_sets, str) else None)
    if hasattr(comm, "Get_group"):
        api.global_process_set.mpi_comm = comm  # type: ignore[misc]  # it is no property of this set
    groups = api.world("init()").groups
    seen: set[int | None] = {0}
    for each in () if process_sets is None or isinstance(process_sets, str) else process_sets:
        process_set = each if isinstance(each, ProcessSet) else ProcessSet(each)
        if process_set.communicator is None:
            groups.take_over(process_set)
        else:
            api.add_parts(process_set, groups.take_over)
        if process_set.process_set_id in seen:
            process_set.bind(None, None)
            raise ArgumentError(
                f"{process_set}: a process set of these ranks is in the list already, or has all ranks."
            )
        seen.add(process_set.process_set_id)


class HorovodBasics:
    """The rank of this process, and what hvdlite can use here. All objects of this class behave alike.

    Args:
        pkg_path: Ignored, like all further arguments: Horovod looks for its compiled library there, and hvdlite has none.
    """

    def __init__(self, pkg_path: str, *args: Any) -> None:
        self.pkg_path = pkg_path

    init = staticmethod(init)
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

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of each process set in effect, by the number of the set."""
        return {number: list(ranks) for number, ranks in api.world().groups.sets().items()}
