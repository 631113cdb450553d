"""What is observed, as plain data: of a process and its host, of the ranks together, and of the installation on this machine.

The data travel as JSON, and the rules (`rules`) read nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

T = TypeVar("T", bound="Plain")

UNLIMITED = -1
"""A limit that does not exist."""


class Plain:
    """The base of dataclasses that become JSON objects."""

    def pack(self) -> dict[str, Any]:
        """Return the data as a JSON object."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def unpack(cls: type[T], said: Mapping[str, Any]) -> T:
        """Return the data of a JSON object. What it has more is left out."""
        known = {each.name for each in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: _frozen(value) for name, value in said.items() if name in known})


def _frozen(value: Any) -> Any:
    """Return a value with tuples, which JSON does not have, in place of its lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class HostFacts(Plain):
    """What one process sees of itself and of its host, before MPI.

    Attributes:
        host: The host's name.
        rank: The rank, as the MPI launcher's variables say; None outside of a job.
        python: The version of Python.
        packages: The version of each package that is there; None for one that is not.
        broken: Why the import of a package fails, for each that was tried and does.
        nccl: Where the NCCL library is; empty if there is none.
        gpus: The number of NVIDIA GPUs that the driver knows.
        infiniband: The names of the InfiniBand adapters.
        cores: The numbers of the cores that this process may use.
        threads: The value of OMP_NUM_THREADS; empty if it is not set.
        quota: How many cores the cgroup lets all its processes use at a time; None for no limit.
        memory: The bytes that the host, or the cgroup if that has fewer, has left.
        shm: The bytes that /dev/shm has, and that are free in it; None if there is no such folder.
        limits: The soft limits of the process by their names in ``ulimit``: "open files", "processes", "locked memory" and
            "virtual memory" (the latter two in bytes).
    """

    host: str
    rank: int | None = None
    python: str = ""
    packages: Mapping[str, str | None] = field(default_factory=dict)
    broken: Mapping[str, str] = field(default_factory=dict)
    nccl: str = ""
    gpus: int = 0
    infiniband: tuple[str, ...] = ()
    cores: tuple[int, ...] = (0,)
    threads: str = ""
    quota: float | None = None
    memory: int = 2**40
    shm: tuple[int, int] | None = (2**40, 2**40)
    limits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MpiFacts(Plain):
    """What one process sees of MPI.

    Attributes:
        host: The host's name.
        rank: The rank in MPI's world.
        size: The number of ranks in MPI's world.
        library: The name and version of the MPI library.
        threads: The thread level: "SINGLE", "FUNNELED", "SERIALIZED" or "MULTIPLE".
        alone: Why the process sees itself alone, although a launcher has started several; empty if it does not.
    """

    host: str
    rank: int
    size: int
    library: str
    threads: str = "MULTIPLE"
    alone: str = ""


@dataclass(frozen=True)
class RankFacts(Plain):
    """What one rank has measured together with the others.

    Attributes:
        rank: The rank.
        host: The host's name.
        node: A number of its host: the lowest rank there.
        unshared: Why the ranks of the host cannot share memory; empty if they can.
        busy: For each core that the rank may use, which part of a pause in which no rank worked it was busy.
        programs: The programs of this host that used most of the cores meanwhile: process id, name, and how many cores.
        clock: The seconds that the rank's clock is ahead of rank 0's.
        clock_error: `clock` is true within so many seconds.
    """

    rank: int
    host: str
    node: int
    unshared: str = ""
    busy: Mapping[str, float] = field(default_factory=dict)
    programs: tuple[tuple[int, str, float], ...] = ()
    clock: float = 0.0
    clock_error: float = 0.0


@dataclass(frozen=True)
class InstallFacts(Plain):
    """What is installed on this machine, as the command sees it.

    Attributes:
        launcher: The MPI launcher: flavour, version and path; empty if none can be used.
        launcher_fault: Why there is none.
        library: The MPI library; empty if it cannot be used.
        library_fault: Why it cannot be used.
        threads: The thread level that it gives.
        scheduler: The scheduler in whose allocation this process runs: "slurm", "pbs" or "lsf"; empty for none.
        srun: What ``srun --mpi=list`` offers; None if it was not asked.
        srun_fault: Why srun gave no answer.
        unreachable: For each host that does not answer ssh, why.
    """

    launcher: str = ""
    launcher_fault: str = ""
    library: str = ""
    library_fault: str = ""
    threads: str = "MULTIPLE"
    scheduler: str = ""
    srun: tuple[str, ...] | None = None
    srun_fault: str = ""
    unreachable: Mapping[str, str] = field(default_factory=dict)
