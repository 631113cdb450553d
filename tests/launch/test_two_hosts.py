"""Jobs on several hosts, which are namespaces here (tests/support/hosts.py): each rank a process, TCP between hosts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hvdlite.launch.job.hosts import parse_hosts
from hvdlite.launch.job.mpi import Placement, command, environment, find_mpi
from tests.support.hosts import Hosts, hosts, why_not
from tests.support.jobs import LIMIT, PROGRAMS, PROMPT, ROOT, seconds_since_failure, wait_for

EVEN, UNEVEN = "node1:2,node2:2", "node1:2,node2:1"
SPMD_LIMIT = 600.0  # on a busy machine
NOTICED = 10.0  # seconds until each side knows that the other is gone: keep-alive takes about five


@pytest.fixture
def two_hosts() -> Iterator[Hosts]:
    """Two hosts, or a skip that says why there are none."""
    if reason := why_not():
        pytest.skip(reason)
    with hosts(2) as found:
        yield found


def slots(where: str) -> int:
    return sum(host.slots for host in parse_hosts(where))


def mpirun(on: Hosts, where: str, *program: str, timeout: float, **environ: str) -> subprocess.CompletedProcess[str]:
    """Plain mpirun, with the flags that hvdliterun gives it. Both hosts have the same cores, so ranks that wait must yield."""
    mpi = find_mpi()
    placement = Placement(slots(where), tuple(parse_hosts(where)))
    base = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    words = command(mpi, placement, environment(mpi, placement, base), [sys.executable, *program])
    return on.run("node1", *words, timeout=timeout, OMPI_MCA_mpi_yield_when_idle="1", **environ)


def hvdliterun(on: Hosts, where: str, *words: str) -> subprocess.CompletedProcess[str]:
    arguments = ["-np", str(slots(where)), "-H", where, *words]
    done = on.run("node1", sys.executable, "-m", "hvdlite.launch", *arguments, timeout=LIMIT)
    # Now and then mpirun notes that ssh was faster than it: harmless, and before anything that counts.
    done.stderr = re.sub(r"^\[\S+\] plm:ssh: Warning: setpgid.*\n", "", done.stderr)
    return done


def assert_nothing_left(on: Hosts) -> None:
    wait_for(lambda: not on.processes(), PROMPT)
    assert [on.shared_memory(name) for name in on.names] == [[], []]


# What depends on which ranks share a host.
SPMD = [
    "adasum",
    "join",
    "message_sizes",
    "operations",
    "overlap",
    "process_sets",
    "sharded",
    "torch_distributed",
    "torch_join",
    "torch_training",
]
# They look at what ranks agree on, or at options of the adapter, and not at who shares memory with whom.
FEW = ["join", "process_sets", "sharded"]
OTHERS = ["communicator", "order", "torch_operations", "torch_options", "torch_pipeline"]


@pytest.mark.timeout(SPMD_LIMIT + 20)
@pytest.mark.parametrize(
    ("where", "names"),
    [
        pytest.param(UNEVEN, FEW, marks=pytest.mark.slow, id="few"),
        pytest.param(EVEN, [*SPMD, *OTHERS], marks=pytest.mark.weekly, id="even"),
        pytest.param(UNEVEN, [*SPMD, *OTHERS], marks=pytest.mark.weekly, id="uneven, sockets"),
    ],
)
def test_spmd(two_hosts: Hosts, where: str, names: list[str]) -> None:
    by_sockets = where == UNEVEN and names != FEW
    files = ["--quick", *(str(ROOT / f"tests/spmd/test_{name}.py") for name in names)]
    done = mpirun(
        two_hosts,
        where,
        *("-m", "pytest", "-x", "-q", "--timeout=150", "--color=no", "-p", "no:cacheprovider", *files),
        timeout=SPMD_LIMIT,
        HVDLITE_TEST_MPI="1",
        **({"HVDLITE_BETWEEN_HOSTS": "sockets", "HVDLITE_TEST_SOCKETS": "1"} if by_sockets else {}),
        HVDLITE_ADVICE="0",
        HVDLITE_DEADLOCK_TIME_SECONDS="0.3",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    assert done.stdout.count(" passed") == slots(where)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("where", "places"),
    [
        (EVEN, ["0 4 0 2 0 2 node1", "1 4 1 2 0 2 node1", "2 4 0 2 1 2 node2", "3 4 1 2 1 2 node2"]),
        (UNEVEN, ["0 3 0 2 0 2 node1", "1 3 1 2 0 1 node1", "2 3 0 1 1 2 node2"]),
    ],
)
def test_places(two_hosts: Hosts, where: str, places: list[str]) -> None:
    done = hvdliterun(two_hosts, where, "--no-tag-output", str(PROGRAMS / "place.py"))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(re.findall(r"^place (.*)$", done.stdout, re.M)) == places
    assert_nothing_left(two_hosts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [("SIGKILL", 137, "was killed by SIGKILL"), ("exception", 1, "the reason of the last rank")],
)
def test_rank_fails_on_the_other_host(two_hosts: Hosts, how: str, code: int, words: str) -> None:
    done = hvdliterun(two_hosts, EVEN, str(PROGRAMS / "last.py"), how)
    assert seconds_since_failure(done.stdout, time.time()) < PROMPT
    assert done.returncode == code
    assert done.stderr.startswith(f"hvdliterun: rank 3 on host node2 failed (exit code {code}):\n")
    assert words in done.stderr
    assert_nothing_left(two_hosts)


def test_a_host_that_is_cut_off_ends_the_job(two_hosts: Hosts) -> None:
    def are_running() -> bool:
        return sum("worker.py" in line for line in two_hosts.processes()) == 9  # 4 ranks, 4 guards, mpirun

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(hvdliterun, two_hosts, EVEN, str(PROGRAMS / "stubborn.py"))
        wait_for(are_running, LIMIT)
        cut_at = time.monotonic()
        two_hosts.cut("node2")
        done = job.result()
    assert time.monotonic() - cut_at < NOTICED + PROMPT
    assert done.returncode != 0
    assert "node2" in done.stderr
    assert_nothing_left(two_hosts)  # on node2 neither


@pytest.mark.costly
@pytest.mark.parametrize("way", ["sockets", "mpi"])
def test_a_rank_dies_in_a_large_exchange(two_hosts: Hosts, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDLITE_BETWEEN_HOSTS", way)
    done = hvdliterun(two_hosts, "node1:1,node2:1", str(PROGRAMS / "large_exchange.py"), "dies")
    assert seconds_since_failure(done.stdout, time.time()) < PROMPT
    assert done.returncode == 137
    assert done.stderr.startswith("hvdliterun: rank 1 on host node2 failed (exit code 137):\n"), done.stderr
    assert_nothing_left(two_hosts)


@pytest.mark.slow
def test_a_cable_is_cut_in_a_large_exchange(two_hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDLITE_BETWEEN_HOSTS", "sockets")
    begun = tmp_path / "begun"
    with ThreadPoolExecutor(1) as pool:
        program = str(PROGRAMS / "large_exchange.py"), "goes on", str(begun)
        job = pool.submit(hvdliterun, two_hosts, "node1:1,node2:1", *program)
        wait_for(begun.exists, LIMIT)
        two_hosts.cut("node2")
        cut_at = time.monotonic()
        done = job.result()
    assert time.monotonic() - cut_at < NOTICED + PROMPT
    assert done.returncode != 0
    assert "node2" in done.stderr
    assert_nothing_left(two_hosts)


WAY = """
import sys, numpy as np, hvdlite as hvd
hvd.init()
data = np.full(2**20, hvd.rank() + 1.0)
hvd.allreduce(data, hvd.Sum, inplace=True)
collectives = hvd.api.world().groups.everybody.engine._collectives
links = getattr(collectives.flat, "_links", None) or getattr(collectives.between_hosts, "_links", None)
print("way", *([] if links is None else [links._streams[1 - hvd.rank()].getsockname()[1]]), data.min(), data.max())
"""


@pytest.mark.costly
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, r"way 3.0 3.0"),
        ({"HVDLITE_BETWEEN_HOSTS": "auto"}, r"way \d+ 3.0 3.0"),
        ({"HVDLITE_BETWEEN_HOSTS": "sockets", "HVDLITE_PORTS": "31007-31008"}, r"way \d+ 3.0 3.0"),
    ],
)
def test_the_way_of_large_data(two_hosts: Hosts, options: dict[str, str], expected: str) -> None:
    done = mpirun(two_hosts, "node1:1,node2:1", "-c", WAY, timeout=LIMIT, **options)
    assert (done.returncode, done.stderr) == (0, "")
    said = re.findall(r"^way .*$", done.stdout, re.M)
    assert len(said) == 2 and all(re.fullmatch(expected, line) for line in said), said
    if "HVDLITE_PORTS" in options:  # rank 1 dials rank 0
        assert any(" 31007 " in line for line in said), said


@pytest.mark.slow
def test_a_slow_network() -> None:
    if reason := why_not(needs_rate=True):
        pytest.skip(reason)
    with hosts(2, rate="100mbit") as two:
        done = hvdliterun(two, "node1:1,node2:1", "--no-tag-output", str(PROGRAMS / "timed.py"))
    assert done.returncode == 0, done.stderr
    took = [float(seconds) for seconds in re.findall(r"took (\S+)", done.stdout)]
    assert len(took) == 2 and min(took) > 0.5  # 8 MiB each way are 0.67 s, less what the limit lets through at once


ASK = """
import json, sys, time, urllib.request
answers = []
for host in ("10.77.0.1", "10.77.0.2"):
    request = urllib.request.Request(
        f"http://{host}:8000/v1/predict", json.dumps({"input": 5}).encode(), {"content-type": "application/json"}
    )
    while True:
        try:
            answers.append(json.loads(urllib.request.urlopen(request, timeout=10).read()))
            break
        except OSError:
            time.sleep(0.05)  # it does not listen yet, or no replica is ready
print(answers)
"""


@pytest.mark.slow
def test_a_server_on_each_host(two_hosts: Hosts) -> None:
    launch = ["-m", "hvdlite.launch", "-np", "2", "-H", "node1:1,node2:1", sys.executable, "-m", "hvdlite", "serve"]
    words = [sys.executable, *launch, "tests.programs.servables:counted", "--host", "0.0.0.0"]
    command, environ = two_hosts.command("node1", words, os.environ)
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        try:
            asked = two_hosts.run("node1", sys.executable, "-c", ASK, timeout=LIMIT)
            assert asked.stdout.strip() == "[{'output': 5}, {'output': 5}]", asked
            (launcher,) = [
                pid for pid in two_hosts.pids() if "hvdlite.launch" in Path(f"/proc/{pid}/cmdline").read_text()
            ][:1]
            os.kill(launcher, signal.SIGTERM)
            said = job.communicate(timeout=LIMIT)[0]
        finally:
            job.kill()
    assert all(
        f"[{rank}] hvdlite serve: The server ends when it has answered what is there" in said for rank in (0, 1)
    ), said
    assert_nothing_left(two_hosts)


@pytest.mark.slow
def test_nothing_is_left_when_the_tests_are_killed(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    code = "import os; from tests.support.hosts import hosts\n"
    code += "with hosts(2) as two: print(os.readlink(f'/proc/{two.pid}/ns/pid'), flush=True); "
    code += "two.run('node2', 'sleep', '600', timeout=600)"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    tests = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert tests.stdout is not None
        lab = tests.stdout.readline().strip()
        wait_for(lambda: "sleep" in names_in(lab), LIMIT)
    finally:
        tests.kill()
        tests.communicate(timeout=LIMIT)
    wait_for(lambda: not names_in(lab), LIMIT)
    assert not list(tmp_path.iterdir())


def names_in(pid_namespace: str) -> set[str]:
    """The names of the processes in a namespace."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry / "ns/pid") == pid_namespace:
                found.add((entry / "comm").read_text().strip())
    return found
