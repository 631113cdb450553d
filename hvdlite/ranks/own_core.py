"""Keeps the ranks of a host on cores of their own while they wait for each other.

A rank that waits offers its core again and again. If another rank runs on the same core, the two take turns there, although
another core may idle: Linux does not move a task that has run within the last half millisecond, for its data are still in the
cache (`sched_migration_cost_ns`), and these two always have. On two cores that lasted half of the time, and a message of 1 MiB
took 0.29 ms in place of 0.15 ms.

So a thread that offers its core counts how often somebody else took it. If that is most times, the thread moves to the core
that belongs to its rank, and may leave it again at once: no thread is bound to a core. hvdlite's own background threads stay
where they are, for the program's thread may compute on that core.
"""

from __future__ import annotations

import os
import resource
import threading

_LOOK_EVERY = 8
"""After how many offers a thread looks whether somebody else has run. A look takes as long as an offer, 0.5 µs."""

_place: tuple[int, int] | None = None
"""The number of this rank on its host, and how many ranks the host has; None if ranks are threads of one process."""


class _Offers(threading.local):
    """What one thread has offered, and how often somebody else has run since the last look."""

    count = 0
    switches: int | None = None


_offers = _Offers()


def settle(local_rank: int, local_size: int) -> None:
    """Say which rank of its host this process is. Before, nothing is moved."""
    global _place
    _place = local_rank, local_size


def yield_core() -> None:
    """Let another thread or process run on this core first, if there is one. Move away if there always is."""
    os.sched_yield()
    if _place is None:
        return
    mine = _offers
    mine.count += 1
    if mine.count >= _LOOK_EVERY:
        mine.count = 0
        switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        before, mine.switches = mine.switches, switches
        if before is not None and switches - before > _LOOK_EVERY // 2:
            _go_home(*_place)


def home(cores: set[int], local_rank: int, local_size: int) -> int | None:
    """Return the core that belongs to a rank of this host; None if there are fewer cores than ranks.

    Args:
        cores: The cores that the rank may use.
        local_rank: The number of the rank on its host.
        local_size: The number of ranks of the host.
    """
    return sorted(cores)[local_rank * len(cores) // local_size] if len(cores) >= local_size else None


def _go_home(local_rank: int, local_size: int) -> None:
    global _place
    if threading.current_thread().name.startswith("hvdlite-"):
        return
    cores = os.sched_getaffinity(0)
    core = home(cores, local_rank, local_size)
    if core is None:
        return
    try:
        os.sched_setaffinity(0, {core})
        os.sched_setaffinity(0, cores)
    except OSError:  # a container may forbid it
        _place = None
