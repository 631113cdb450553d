"""The tests of tests/spmd once more, under plain mpirun, each rank a process."""

from __future__ import annotations

import pytest

from tests.jobs import ROOT, mpirun


@pytest.mark.parametrize("size", [2, 3, 4])
def test_spmd(size: int) -> None:
    done = mpirun(
        size,
        *("-m", "pytest", "-x", "-q", "--timeout=60", "--color=no", "-p", "no:cacheprovider", str(ROOT / "tests/spmd")),
        timeout=280,
        HVDLITE_TEST_MPI="1",
        HVDLITE_DEADLOCK_TIME_SECONDS="0.3",
        HVDLITE_ADVICE="0",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    assert done.stdout.count(" passed") == size
