"""Jobs under a real Slurm, whose nodes are namespaces (tests/support/slurm.py): srun, sbatch, salloc, scancel."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import hosts as lab
from tests.support import slurm
from tests.support.jobs import PROGRAMS, wait_for

PLACE, LAST = str(PROGRAMS / "place.py"), str(PROGRAMS / "last.py")
LIMIT = 120.0  # seconds for one command: Slurm's own waits come on top of a job's
HVDLITERUN = (sys.executable, "-m", "hvdlite.launch")
NODES = ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1")
TWICE = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
ON_EACH = ["0 2 0 1 0 2 node1", "1 2 0 1 1 2 node2"]
EVERYWHERE = ["0 4 0 2 0 2 node1", "1 4 1 2 0 2 node1", "2 4 0 2 1 2 node2", "3 4 1 2 1 2 node2"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Slurm]:
    """Slurm with two nodes, or a skip that says why there is none."""
    if reason := slurm.why_not():
        pytest.skip(reason)
    with lab.hosts(2) as two:
        yield slurm.start(two)


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: slurm.Slurm) -> Iterator[None]:
    """After each test Slurm has no job, and the nodes neither processes of one nor anything in shared memory."""
    yield
    wait_for(lambda: not cluster.run("squeue", "-h", timeout=LIMIT).stdout, LIMIT)
    wait_for(lambda: not [line for line in cluster.hosts.processes() if "python" in line], LIMIT)
    assert [cluster.hosts.shared_memory(name) for name in cluster.hosts.names] == [[], []]


def places(text: str) -> list[str]:
    return sorted(re.findall(r"place (.*)$", text, re.M))


def succeeds(cluster: slurm.Slurm, *words: str) -> str:
    """Run a command that must succeed, and return what it prints."""
    done = cluster.run(*words, timeout=LIMIT)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{cluster.log()}"
    return done.stdout


def needs_pmix(cluster: slurm.Slurm) -> None:
    done: subprocess.CompletedProcess[str] = cluster.run("srun", "--mpi=pmix", "true", timeout=LIMIT)
    if "PMIx" in done.stderr or "pmix" in done.stderr:
        said = done.stderr.strip().splitlines()[0]
        pytest.skip(f"this Slurm has no PMIx that it can load ({said}); Debian: libpmix-dev")


def test_srun(cluster: slurm.Slurm) -> None:
    needs_pmix(cluster)
    assert places(succeeds(cluster, "srun", *NODES, "--mpi=pmix", sys.executable, PLACE)) == ON_EACH


def test_srun_without_pmix_is_refused(cluster: slurm.Slurm) -> None:
    done = cluster.run("srun", *NODES, "--mpi=none", sys.executable, PLACE, timeout=LIMIT)
    assert done.returncode == 1
    refused = r"WorldSizeError: SLURM_STEP_NUM_TASKS=2: srun started 2 processes, but MPI .* srun --mpi=pmi(x|2) "
    assert len(re.findall(refused, done.stderr)) == 2


def test_srun_ends_the_job_when_a_rank_fails(cluster: slurm.Slurm) -> None:
    needs_pmix(cluster)
    done = cluster.run("srun", *NODES, "--mpi=pmix", sys.executable, LAST, "exception", timeout=LIMIT)
    assert done.returncode != 0
    assert done.stderr.count("ValueError: the reason of the last rank") == 1


def test_hvdliterun_takes_the_nodes_of_sbatch(cluster: slurm.Slurm) -> None:
    script, out = cluster.folder / "job.sh", cluster.folder / "job.out"
    script.write_text(f"#!/bin/sh\n{' '.join(HVDLITERUN)} -np 4 {PLACE}\necho ended with $?\n")
    succeeds(cluster, "sbatch", *TWICE, f"--output={out}", str(script))
    wait_for(lambda: out.exists() and "ended with" in out.read_text(), LIMIT)
    assert out.read_text().endswith("\nended with 0\n")
    assert places(out.read_text()) == EVERYWHERE


def test_hvdliterun_on_whole_nodes(cluster: slurm.Slurm) -> None:
    """Where only nodes were asked for, the ranks are spread over them."""
    said = succeeds(cluster, "salloc", "-Q", "--nodes=2", "--exclusive", *HVDLITERUN, "-np", "2", PLACE)
    assert places(said) == ON_EACH


def test_hvdliterun_in_a_step(cluster: slurm.Slurm) -> None:
    """A step of srun has counts of its own, and the ranks go to the nodes of the job all the same."""
    step = ("srun", "--overlap", "--nodes=1", "--ntasks=1")
    assert places(succeeds(cluster, "salloc", "-Q", *TWICE, *step, *HVDLITERUN, "-np", "4", PLACE)) == EVERYWHERE


def test_hvdliterun_names_the_rank_that_was_killed(cluster: slurm.Slurm) -> None:
    done = cluster.run("salloc", "-Q", *NODES, *HVDLITERUN, "-np", "2", LAST, "SIGKILL", timeout=LIMIT)
    assert done.returncode == 137
    assert "hvdliterun: rank 1 on host node2 failed (exit code 137):\n" in done.stderr


def test_too_few_tasks(cluster: slurm.Slurm) -> None:
    done = cluster.run("salloc", "-Q", "--nodes=2", "--ntasks=2", *HVDLITERUN, "-np", "4", PLACE, timeout=LIMIT)
    assert done.returncode == 2 and "--ntasks 4" in done.stderr


def test_scancel_ends_every_rank(cluster: slurm.Slurm) -> None:
    script, out = cluster.folder / "stubborn.sh", cluster.folder / "stubborn.out"
    script.write_text(f"#!/bin/sh\nexec {' '.join(HVDLITERUN)} -np 2 {PROGRAMS / 'stubborn.py'}\n")
    number = succeeds(cluster, "sbatch", "--parsable", *NODES, f"--output={out}", str(script)).strip()
    wait_for(lambda: out.exists() and out.read_text().count("ready") == 2, LIMIT)
    succeeds(cluster, "scancel", number)  # the fixture waits until all have ended
