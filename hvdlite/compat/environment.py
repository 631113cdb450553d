"""``horovod.runner.common.util.env`` reads a process's rank, even before `init`, from the variables of its launcher."""

from __future__ import annotations

import os

from hvdlite.errors import ArgumentError

_RANK_AND_SIZE = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as the variables of the launcher say; (0, 1) if none is set.

    Raises:
        ArgumentError: Only one variable of a pair is set, or one of them is no whole number.
    """
    for rank, size in _RANK_AND_SIZE:
        if rank in os.environ and size in os.environ:
            try:
                return int(os.environ[rank]), int(os.environ[size])
            except ValueError:
                raise ArgumentError(
                    f"{rank}={os.environ[rank]!r} and {size}={os.environ[size]!r}: expected two numbers."
                ) from None
        if rank in os.environ or size in os.environ:
            there, gone = (rank, size) if rank in os.environ else (size, rank)
            raise ArgumentError(f"{there} is set and {gone} is not: set both, or none, in the environment of the rank.")
    return 0, 1
