"""The tests of tests/spmd once more, under plain mpirun, each rank a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import ROOT, mpirun

FILES = sorted((ROOT / "tests/spmd").glob("test_*.py"))
TENSORFLOW = [path for path in FILES if path.name.startswith(("test_tf_", "test_keras_"))]
REST = [path for path in FILES if path not in TENSORFLOW]
LONG = {"test_torch_idioms.py", "test_torch_programs.py", "test_torch_steps.py"}
"""Comparisons of many programs with one process: two processes tell what threads do not."""


def files_for(files: list[Path], size: int) -> list[Path]:
    """What is run again on so many processes."""
    return [path for path in files if size == 2 or path.name not in LONG]


LIMIT = 900.0  # on a busy machine


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize(
    ("size", "files"),
    # Each process of TensorFlow's takes seconds to start, and nothing there begins at four.
    [*((size, files_for(REST, size)) for size in (2, 3, 4)), *((size, files_for(TENSORFLOW, size)) for size in (2, 3))],
    ids=["2", "3", "4", "2-tensorflow", "3-tensorflow"],
)
def test_spmd(size: int, files: list[Path]) -> None:
    done = mpirun(
        size,
        *("-m", "pytest", "-x", "-q", "--timeout=60", "--color=no", "-p", "no:cacheprovider", *map(str, files)),
        timeout=LIMIT,
        HVDLITE_TEST_MPI="1",
        HVDLITE_DEADLOCK_TIME_SECONDS="0.3",
        HVDLITE_ADVICE="0",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    assert done.stdout.count(" passed") == size
