"""The tests of tests/spmd once more, under plain mpirun, each rank a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MPIRUN = Path(sys.executable).with_name("mpirun")
FLAGS = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
FLAGS += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca", "mpi_yield_when_idle", "1"]


def mpirun(ranks: int, *command: str, timeout: float, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a Python command on some ranks; a TimeoutExpired if it hangs."""
    return subprocess.run(
        [str(MPIRUN), *FLAGS, "-n", str(ranks), sys.executable, *command],
        env={**os.environ, **environ},
        cwd=TESTS.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_spmd(size: int) -> None:
    done = mpirun(
        size,
        *("-m", "pytest", "-x", "-q", "--timeout=60", "--color=no", "-p", "no:cacheprovider", str(TESTS / "spmd")),
        timeout=240,
        HVDLITE_TEST_MPI="1",
        HVDLITE_DEADLOCK_TIME_SECONDS="0.3",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    assert done.stdout.count(" passed") == size
