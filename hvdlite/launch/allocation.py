"""This file chooses the hosts of a job, if the command line names none.

They are the hosts of the Slurm, PBS or LSF allocation that hvdliterun runs in. Without an allocation they are those of a
default hostfile, as Kubeflow's MPIJob sets one. Without that, the job gets this machine alone.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdlite.errors import LaunchError
from hvdlite.launch.job.hosts import Host, check_slots, make_host, parse_hostfile, parse_hosts

DEFAULT_HOSTFILES = ("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile", "HYDRA_HOST_FILE")
_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC")
_SCHEDULERS = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID", "lsf": "LSB_JOBID"}
_MOST_HOSTS = 100_000


@dataclass(frozen=True)
class Hosts:
    """The hosts on which a job's ranks run.

    Attributes:
        hosts: The hosts, in the order of the ranks; empty means this machine alone.
        source: What named the hosts, in words for an error message.
        scheduler: "slurm", "pbs" or "lsf", if hvdliterun runs in a job of that scheduler; else empty.
        by_ssh: The MPI launcher will reach the hosts by plain ssh, so hvdliterun can try ssh first.
        environ: What to change in the environment of the MPI launcher.
        advice: What helps if the hosts have too few slots.
    """

    hosts: tuple[Host, ...]
    source: str
    scheduler: str = ""
    by_ssh: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
    advice: str = "Give the hosts more slots with -H host:slots, or start fewer ranks."


def choose_hosts(hosts: str | None, hostfile: str | None, num_proc: int, environ: Mapping[str, str]) -> Hosts:
    """Find the hosts of a job: from the command line, the allocation, a default hostfile, or else this machine.

    Args:
        hosts: The value of ``-H``, such as "node1:4,node2:4"; None if it was not given.
        hostfile: The path that ``--hostfile`` gives; None if it was not given.
        num_proc: The number of ranks.
        environ: The environment of hvdliterun.

    Raises:
        LaunchError: The list of hosts cannot be read, or the hosts have too few slots.
    """
    unknown = hosts_to_be_found(environ)
    scheduler, by_ssh = unknown.scheduler, unknown.by_ssh
    if hosts is not None or hostfile is not None:
        named = parse_hosts(hosts) if hosts is not None else parse_hostfile(str(hostfile))
        by_ssh = by_ssh and scheduler != "slurm"
        counts = _counts_for_mpi(environ, named) if scheduler == "slurm" else {}
        return _checked(Hosts(tuple(named), "the command line", scheduler, by_ssh, counts), num_proc)
    for find in (_slurm, _pbs, _lsf):
        if found := find(environ, num_proc):
            return _checked(found, num_proc)
    for variable in DEFAULT_HOSTFILES:
        if path := environ.get(variable):
            named = parse_hostfile(path)
            return _checked(Hosts(tuple(named), f"{variable}={path}", scheduler, by_ssh), num_proc)
    return Hosts((), "no host was named", scheduler)


def hosts_to_be_found(environ: Mapping[str, str]) -> Hosts:
    """Return `Hosts` without any host, for a job whose hosts a script will name."""
    scheduler = next((name for name, variable in _SCHEDULERS.items() if variable in environ), "")
    return Hosts((), "a script", scheduler, not any(name in environ for name in _AGENTS))


def _checked(found: Hosts, num_proc: int) -> Hosts:
    check_slots(found.hosts, num_proc, found.source, found.advice)
    return found


def _slurm(environ: Mapping[str, str], num_proc: int) -> Hosts | None:
    nodes = environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST"))
    if not nodes or "SLURM_JOB_ID" not in environ:
        return None
    names = expand_nodes(nodes, "SLURM_JOB_NODELIST")
    tasks = _per_node(environ, "SLURM_TASKS_PER_NODE", names) if _counts_are_the_jobs(environ) else None
    # If only nodes were asked for, the ranks are dealt out evenly, to as many as the nodes have processors.
    if tasks is None or sum(tasks) < num_proc or not {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} & set(environ):
        processors = _per_node(environ, "SLURM_JOB_CPUS_PER_NODE", names)
        if processors is not None:
            each = environ.get("SLURM_CPUS_PER_TASK", "1")
            if not re.fullmatch(r"0*[1-9][0-9]{0,5}", each):
                raise LaunchError(f"SLURM_CPUS_PER_TASK={each}: expected a whole number from 1 on.")
            tasks = deal([max(1, count // int(each)) for count in processors], num_proc)
    tasks = [1] * len(names) if tasks is None else tasks
    found = _allocated("slurm", "the Slurm allocation (SLURM_JOB_NODELIST)", zip(names, tasks, strict=True))
    advice = f"Ask Slurm for more tasks (sbatch or salloc --ntasks {num_proc}), start fewer ranks, or name the hosts with -H."
    return replace(found, environ=_counts_for_mpi(environ, found.hosts), advice=advice)


def _counts_are_the_jobs(environ: Mapping[str, str]) -> bool:
    """Tell whether SLURM_TASKS_PER_NODE counts the tasks of the job, not those of the step of srun that this process is in."""
    step = environ.get("SLURM_STEP_TASKS_PER_NODE")
    return step is None or step != environ.get("SLURM_TASKS_PER_NODE")


def _counts_for_mpi(environ: Mapping[str, str], hosts: Sequence[Host]) -> dict[str, str]:
    """Return the counts of tasks that Open MPI is to read: those of `hosts`, if the allocation has them.

    Open MPI takes no more slots of ``-H`` than it reads in SLURM_TASKS_PER_NODE, and puts the other ranks where it likes.
    """
    try:
        names = expand_nodes(environ.get("SLURM_JOB_NODELIST", ""), "SLURM_JOB_NODELIST")
    except LaunchError:  # with -H nobody needs the list
        return {}
    slots: Counter[str] = Counter()
    for host in hosts:
        slots[host.name] += host.slots
    if not set(slots) <= set(names):
        return {}
    return {"SLURM_TASKS_PER_NODE": ",".join(str(slots[name] or 1) for name in names)}


def deal(places: Sequence[int], count: int) -> list[int]:
    """Deal `count` ranks out to nodes as evenly as their places allow, at least one to each node.

    Args:
        places: The places of each node, from 1 on.
        count: The number of ranks. If it is larger than the sum of the places, each node gets as many as it has places.

    Returns:
        The number of ranks of each node. The first nodes get one more where it does not come out even.
    """
    level, left = max(1, count // len(places)), count
    dealt = [min(each, level) for each in places]
    left -= sum(dealt)
    while left > 0 and dealt != list(places):
        for node, each in enumerate(places):
            if left > 0 and dealt[node] < each:
                dealt[node] += 1
                left -= 1
    return dealt


def _pbs(environ: Mapping[str, str], _num_proc: int) -> Hosts | None:
    path = environ.get("PBS_NODEFILE")
    return _allocated("pbs", f"PBS_NODEFILE={path}", Counter(_lines(path)).items()) if path else None


def _lsf(environ: Mapping[str, str], _num_proc: int) -> Hosts | None:
    if path := environ.get("LSB_DJOB_HOSTFILE"):
        return _allocated("lsf", f"LSB_DJOB_HOSTFILE={path}", Counter(_lines(path)).items())
    if words := environ.get("LSB_MCPU_HOSTS", "").split():
        counts = words[1::2]
        if len(counts) * 2 != len(words) or not all(re.fullmatch(r"[0-9]{1,6}", count) for count in counts):
            raise LaunchError(f"LSB_MCPU_HOSTS={' '.join(words)}: expected 'host slots host slots ...'.")
        return _allocated("lsf", "LSB_MCPU_HOSTS", zip(words[::2], map(int, counts), strict=True))
    if words := environ.get("LSB_HOSTS", "").split():
        return _allocated("lsf", "LSB_HOSTS", Counter(words).items())
    return None


def _allocated(scheduler: str, source: str, counts: Iterable[tuple[str, int]]) -> Hosts:
    """Make the `Hosts` of an allocation. `by_ssh` is false: a scheduler may start processes in another way."""
    hosts = tuple(make_host(name, str(count), source) for name, count in counts)
    if not hosts:
        raise LaunchError(f"{source} names no host.")
    return Hosts(hosts, source, scheduler, by_ssh=False)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read the list of the allocation's hosts, {path}: {error}") from error


def _per_node(environ: Mapping[str, str], variable: str, names: Sequence[str]) -> list[int] | None:
    """Read counts such as ``4(x2),3``, and return one for each node: [4, 4, 3]. Return None if the variable is not set."""
    text = environ.get(variable)
    if text is None:
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            raise LaunchError(f"{variable}={text}: expected counts such as 4(x2),3.")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != len(names):
        raise LaunchError(f"{variable}={text} counts {len(counts)} nodes, the allocation has {len(names)}: give -H.")
    return counts


def expand_nodes(text: str, where: str) -> list[str]:
    """Expand a list of hosts in Slurm's notation: ``node[01-03,7],login`` is node01, node02, node03, node7, login.

    Args:
        text: The list.
        where: The variable that holds the list; errors name it.

    Raises:
        LaunchError: The text is not such a list, or it names more than 100,000 hosts.
    """
    if not re.fullmatch(r"(?:[^\[\],]+|\[[0-9,\-]+\]|,)+", text):
        raise LaunchError(f"{where}={text}: expected a list of hosts such as node[01-04],login.")
    names: list[str] = []
    for entry in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", text):
        parts = [_ranges(part, where) if part[0] == "[" else [part] for part in re.findall(r"\[[^\]]*\]|[^\[]+", entry)]
        size = 1
        for part in parts:
            size *= len(part)
        if len(names) + size > _MOST_HOSTS:
            raise LaunchError(f"{where}={text[:200]}: more than {_MOST_HOSTS} hosts.")
        names += ["".join(words) for words in itertools.product(*parts)]
    return names


def _ranges(text: str, where: str) -> list[str]:
    """Expand ``[01-03,7]`` to "01", "02", "03", "7". Numbers keep their leading zeros."""
    numbers: list[str] = []
    for part in text[1:-1].split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            raise LaunchError(f"{where}: {text!r}: expected numbers and ranges such as [01-04,7].")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= _MOST_HOSTS:
            raise LaunchError(f"{where}: {text!r}: {part!r} is no range of at most {_MOST_HOSTS} hosts.")
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers
