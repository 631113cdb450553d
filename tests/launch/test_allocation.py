"""Hosts that the command line does not name: those of an allocation, of a default hostfile, or this machine."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.errors import LaunchError
from hvdlite.launch.allocation import Hosts, choose_hosts, deal, expand_nodes
from hvdlite.launch.job.hosts import Host
from hvdlite.launch.job.mpi import Mpi, Placement, command
from tests.support import hosts as lab
from tests.support.jobs import LIMIT, PROGRAMS, Start

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOBID": "7",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7],login", ["node01", "node02", "node03", "node7", "login"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("a[1]-ib.cluster,b", ["a1-ib.cluster", "b"]),
        ("n[0099-0101]", ["n0099", "n0100", "n0101"]),
    ],
)
def test_lists_of_nodes(text: str, names: list[str]) -> None:
    assert expand_nodes(text, "X") == names


@pytest.mark.parametrize(
    "text",
    ["node[1-2", "node[]", "node[2-1]", "node]1[", "node[a-b]", "", "n[1-999999999]", "n[1-999]x[1-999]", "n[[1]]"],
)
def test_bad_lists_of_nodes(text: str) -> None:
    with pytest.raises(LaunchError, match="X"):
        expand_nodes(text, "X")


NAMES = st.from_regex(r"[a-z]{1,3}(-[a-z])?", fullmatch=True)
RANGES = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=3)


@given(st.lists(st.tuples(NAMES, RANGES, st.sampled_from(["", ".cluster", "-ib"])), min_size=1, max_size=4))
def test_any_list_of_nodes(entries: list[tuple[str, list[tuple[int, int, int]], str]]) -> None:
    names, written = [], []
    for name, ranges, end in entries:
        parts = []
        for first, more, width in ranges:
            parts.append(f"{first:0{width}d}" + (f"-{first + more:0{width}d}" if more else ""))
            names += [f"{name}{number:0{width}d}{end}" for number in range(first, first + more + 1)]
        written.append(f"{name}[{','.join(parts)}]{end}")
    assert expand_nodes(",".join(written), "X") == names


@given(st.lists(st.integers(0, 99), min_size=1, max_size=12), st.integers(1, 300))
def test_any_counts_of_tasks(counts: list[int], num_proc: int) -> None:
    counts = [count + 1 for count in counts]
    runs = [(value, len(list(group))) for value, group in itertools.groupby(counts)]
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": str(sum(counts)),
        "SLURM_JOB_NODELIST": f"n[1-{len(counts)}]",
        "SLURM_TASKS_PER_NODE": ",".join(f"{value}(x{times})" if times > 1 else str(value) for value, times in runs),
    }
    hosts = [Host(f"n{number}", count) for number, count in enumerate(counts, 1)]
    if num_proc <= sum(counts):
        found = chosen(num_proc, environ)
        assert list(found.hosts) == hosts
        assert found.environ["SLURM_TASKS_PER_NODE"] == ",".join(map(str, counts))
    dealt = deal(counts, num_proc)
    assert len(dealt) == len(counts) and all(1 <= got <= most for got, most in zip(dealt, counts, strict=True))
    if len(counts) <= num_proc:
        assert sum(dealt) == min(num_proc, sum(counts))
    highest = max(dealt)  # even: a node that has room left is at most one below the one that has most
    assert all(got == most or got >= highest - 1 for got, most in zip(dealt, counts, strict=True))


def test_srun_that_starts_hvdliterun_several_times(start: Start) -> None:
    for task in ("0", "1"):
        ended = start("-np", "2", "prog.py", env={"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": task}).end()
        assert ended.code == 2 and "srun has started 2 processes" in ended.err


def chosen(num_proc: int, environ: dict[str, str], hosts: str | None = None) -> Hosts:
    return choose_hosts(hosts, None, num_proc, environ)


def test_slurm() -> None:
    found = chosen(4, SLURM)
    assert found.hosts == (Host("node1", 2), Host("node2", 2))
    assert (found.scheduler, found.by_ssh) == ("slurm", False)
    # Tasks that were asked for are taken as they are. Of an allocation of nodes, the processors count, and all nodes get ranks.
    asked = {**SLURM, "SLURM_TASKS_PER_NODE": "3,1", "SLURM_NTASKS": "4"}
    assert [host.slots for host in chosen(4, asked).hosts] == [3, 1]
    assert chosen(4, asked).environ == {"SLURM_TASKS_PER_NODE": "3,1"}
    nodes = {**SLURM, "SLURM_TASKS_PER_NODE": "1(x2)"}
    assert [host.slots for host in chosen(2, nodes).hosts] == [1, 1]
    assert [host.slots for host in chosen(5, nodes).hosts] == [3, 2]
    # Within a step of srun, on fewer nodes, the counts of tasks are those of the step.
    step = {**SLURM, "SLURM_TASKS_PER_NODE": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NTASKS": "1"}
    assert [host.slots for host in chosen(4, step).hosts] == [2, 2]
    named = chosen(4, step, "node2:4")
    assert (named.hosts, named.environ) == ((Host("node2", 4),), {"SLURM_TASKS_PER_NODE": "1,4"})
    assert chosen(1, step, "elsewhere").environ == {}
    assert [host.slots for host in chosen(4, {**nodes, "SLURM_CPUS_PER_TASK": "4"}).hosts] == [2, 2]
    for each in ("0", "two", ""):
        with pytest.raises(LaunchError, match=f"SLURM_CPUS_PER_TASK={each}: expected a whole number from 1 on"):
            chosen(4, {**nodes, "SLURM_CPUS_PER_TASK": each})
    with pytest.raises(LaunchError, match=r"has only 16 slots \(the Slurm allocation .*--ntasks 17"):
        chosen(17, SLURM)
    with pytest.raises(LaunchError, match="expected counts such as"):
        chosen(4, {**SLURM, "SLURM_TASKS_PER_NODE": "2(x2"})
    with pytest.raises(LaunchError, match="counts 3 nodes, the allocation has 2"):
        chosen(4, {**SLURM, "SLURM_TASKS_PER_NODE": "2(x3)"})
    # The command line has the last word.
    assert chosen(1, SLURM, "other:1").hosts == (Host("other", 1),)


def test_pbs_and_lsf(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("node1\nnode1\nnode2\nnode1\n")
    expected = (Host("node1", 3), Host("node2", 1))
    pbs = chosen(4, {"PBS_JOBID": "1", "PBS_NODEFILE": str(path)})
    assert (pbs.hosts, pbs.scheduler, pbs.by_ssh) == (expected, "pbs", False)
    for variables in (
        {"LSB_DJOB_HOSTFILE": str(path)},
        {"LSB_MCPU_HOSTS": "node1 3 node2 1"},
        {"LSB_HOSTS": "node1 node1 node1 node2"},
    ):
        lsf = chosen(4, {"LSB_JOBID": "1", **variables})
        assert (lsf.hosts, lsf.scheduler) == (expected, "lsf")
    with pytest.raises(LaunchError, match="cannot read the list of the allocation's hosts"):
        chosen(1, {"PBS_JOBID": "1", "PBS_NODEFILE": "/nowhere"})
    with pytest.raises(LaunchError, match="expected 'host slots"):
        chosen(1, {"LSB_MCPU_HOSTS": "node1 3 node2"})


def test_default_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("job-worker-0.job slots=2\njob-worker-1.job slots=2\n")
    environ = {"OMPI_MCA_orte_default_hostfile": str(path)}
    found = chosen(4, environ)
    assert found.hosts == (Host("job-worker-0.job", 2), Host("job-worker-1.job", 2)) and found.by_ssh
    assert not chosen(4, {**environ, "OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh"}).by_ssh
    with pytest.raises(LaunchError, match=r"has only 4 slots \(OMPI_MCA_orte_default_hostfile="):
        chosen(5, environ)
    assert chosen(5, {}) == Hosts((), "no host was named")


def test_command_in_an_allocation() -> None:
    openmpi, mpich = Mpi("openmpi", "mpirun", (5, 0)), Mpi("mpich", "mpiexec", (5,))
    there = Placement(2, (Host("192.0.2.1", 1), Host("192.0.2.2", 1)), scheduler="slurm", by_ssh=False)
    assert not {"plm", "ras"} & set(command(openmpi, there, [], ["prog"]))
    assert command(mpich, there, [], ["prog"])[1:3] == ["-launcher", "slurm"]
    here = Placement(2, scheduler="slurm")
    assert "--prtemca ras ^slurm,pbs,tm,lsf --prtemca plm ssh" in " ".join(command(openmpi, here, [], ["prog"]))


# ---- jobs ----


def test_this_machine_alone_in_an_allocation_of_others(start: Start) -> None:
    ended = start("-np", "2", "-H", "localhost:2", str(PROGRAMS / "meet.py"), env=SLURM).end()
    assert (ended.code, ended.err) == (0, "")
    assert "[0] met 0 of 2" in ended.out.splitlines()


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[lab.Hosts]:
    """Two hosts, or a skip that says why there are none."""
    if reason := lab.why_not():
        pytest.skip(reason)
    with lab.hosts(2) as found:
        yield found


def places(on: lab.Hosts, **environ: str) -> list[str]:
    words = [sys.executable, "-m", "hvdlite.launch", "-np", "4", "--no-tag-output", str(PROGRAMS / "place.py")]
    done = on.run("node1", *words, timeout=LIMIT, **environ)
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"^place (.*)$", done.stdout, re.M))


EVERYWHERE = ["0 4 0 2 0 2 node1", "1 4 1 2 0 2 node1", "2 4 0 2 1 2 node2", "3 4 1 2 1 2 node2"]


def test_ranks_on_the_hosts_of_slurm(two_hosts: lab.Hosts) -> None:
    assert places(two_hosts, **SLURM) == EVERYWHERE
    nodes_alone = {**SLURM, "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_CPUS_PER_NODE": "2(x2)"}
    assert places(two_hosts, **nodes_alone) == EVERYWHERE
    assert [line.partition(" ")[0] for line in two_hosts.started_by_srun] == ["node2:", "node2:"]


@pytest.mark.slow
def test_ranks_on_the_hosts_of_pbs(two_hosts: lab.Hosts, tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("node1\nnode1\nnode2\nnode2\n")
    pbs = {"PBS_JOBID": "1", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": str(tmp_path / "nodes")}
    assert places(two_hosts, **pbs) == EVERYWHERE


@pytest.mark.slow
def test_ranks_on_the_hosts_of_an_mpijob(two_hosts: lab.Hosts) -> None:
    """The operator gives pods long names, which a pod's own host name is not, and sets variables of older Open MPIs."""
    folder = two_hosts.directory
    with open(folder / "hosts", "a") as names:
        for number in (1, 2):
            (folder / f"w{number}.job.ns.svc").write_text((folder / f"node{number}").read_text())
            names.write(f"10.77.0.{number} w{number}.job.ns.svc\n")
    (folder / "hostfile").write_text("w1.job.ns.svc slots=2\nw2.job.ns.svc slots=2\n")
    operators = {
        "OMPI_MCA_orte_default_hostfile": str(folder / "hostfile"),
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_set_default_slots": "2",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    }
    assert places(two_hosts, **operators) == EVERYWHERE
