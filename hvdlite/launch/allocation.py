"""Which hosts a job gets where the command line names none: those of the allocation that hvdliterun runs in.

The hosts of a Slurm, PBS or LSF job; else of a default hostfile, as Kubeflow's MPIJob names one; else this machine alone.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdlite.errors import LaunchError
from hvdlite.job.hosts import Host, check_slots, make_host, parse_hostfile, parse_hosts

DEFAULT_HOSTFILES = ("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile", "HYDRA_HOST_FILE")
_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC")
_SCHEDULERS = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID", "lsf": "LSB_JOBID"}
_MOST_HOSTS = 100_000


@dataclass(frozen=True)
class Hosts:
    """Where a job's ranks go.

    Attributes:
        hosts: In the order of the ranks; empty means this machine alone.
        source: Who named them, in words.
        scheduler: "slurm", "pbs" or "lsf", if hvdliterun runs in a job of one; else empty.
        by_ssh: The MPI launcher will use plain ssh to reach them, so that it can be tried first.
    """

    hosts: tuple[Host, ...]
    source: str
    scheduler: str = ""
    by_ssh: bool = True


def choose_hosts(hosts: str | None, hostfile: str | None, num_proc: int, environ: Mapping[str, str]) -> Hosts:
    """Find the hosts of a job: from the command line, the allocation, a default hostfile, or else this machine.

    Args:
        hosts: What the command line says, as in ``-H``.
        hostfile: The hostfile that it names.
        num_proc: The number of ranks.
        environ: The environment of hvdliterun.

    Raises:
        LaunchError: What names the hosts cannot be read, or they have too few slots.
    """
    scheduler = next((name for name, variable in _SCHEDULERS.items() if variable in environ), "")
    by_ssh = not any(name in environ for name in _AGENTS)
    if hosts is not None or hostfile is not None:
        named = parse_hosts(hosts) if hosts is not None else parse_hostfile(str(hostfile))
        return _checked(Hosts(tuple(named), "the command line", scheduler, by_ssh and scheduler != "slurm"), num_proc)
    for find in (_slurm, _pbs, _lsf):
        if found := find(environ, num_proc):
            return _checked(found, num_proc)
    for variable in DEFAULT_HOSTFILES:
        if path := environ.get(variable):
            named = parse_hostfile(path)
            return _checked(Hosts(tuple(named), f"{variable}={path}", scheduler, by_ssh), num_proc)
    return Hosts((), "no host was named", scheduler)


def _checked(found: Hosts, num_proc: int) -> Hosts:
    check_slots(found.hosts, num_proc, found.source)
    return found


def _slurm(environ: Mapping[str, str], num_proc: int) -> Hosts | None:
    nodes = environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST"))
    if not nodes or "SLURM_JOB_ID" not in environ:
        return None
    names = expand_nodes(nodes, "SLURM_JOB_NODELIST")
    tasks = _per_node(environ, "SLURM_TASKS_PER_NODE", names)
    # An allocation of nodes alone counts one task for each: then their processors count.
    if tasks is None or sum(tasks) < num_proc:
        processors = _per_node(environ, "SLURM_JOB_CPUS_PER_NODE", names)
        if processors is not None:
            each = int(environ.get("SLURM_CPUS_PER_TASK", "1"))
            tasks = [max(1, count // each) for count in processors]
    tasks = [1] * len(names) if tasks is None else tasks
    pairs = zip(names, tasks, strict=True)
    return _allocated("slurm", "the Slurm allocation (SLURM_JOB_NODELIST)", pairs)


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
    """The hosts that a scheduler gave; it may have a way to start processes there that is not ssh."""
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
    """What ``4(x2),3`` says of each of the nodes; None if the variable is not set."""
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
    """The names that a list of Slurm's stands for: ``node[01-03,7],login`` is node01, node02, node03, node7, login.

    Args:
        text: The list.
        where: Where it stands, for errors.

    Raises:
        LaunchError: The text is something else, or stands for more than 100,000 hosts.
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
    """What ``[01-03,7]`` stands for; numbers keep their leading zeros."""
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
