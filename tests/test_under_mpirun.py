"""The tests of tests/spmd once more, under plain mpirun, each rank a process.

As threads they run on one and three ranks. What is left for processes to show: that each test holds on two ranks that share
nothing, and that what moves data between processes does so for other numbers of them (three, and four).
TensorFlow's have most of their time behind them when they have been traced, so fewer of them run on three.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import ROOT, mpirun

FILES = sorted((ROOT / "tests/spmd").glob("test_*.py"))
TENSORFLOW = [path for path in FILES if path.name.startswith(("test_tf_", "test_keras_"))]
TENSORFLOW += [path for path in FILES if path not in TENSORFLOW and "import tensorflow" in path.read_text()]
"""Each process takes seconds to import it, so those that need it share their processes."""
REST = [path for path in FILES if path not in TENSORFLOW]


def named(*names: str) -> list[Path]:
    """The files of these tests."""
    return [ROOT / f"tests/spmd/test_{name}.py" for name in names]


# Comparisons of many programs with one process: two processes tell what threads do not.
LONG = named("torch_idioms", "torch_models", "torch_programs", "torch_steps")
# What is about messages, memory that processes share, and who is there: the core's tests, and torch's that use most of it.
MOVES_DATA = [
    *named("adasum", "checks", "join", "order", "overlap", "process_sets", "schedule", "timeline"),
    *named("sharded", "torch_gradients", "torch_join", "torch_operations", "torch_training"),
]
OPERATIONS = named("operations")
OPERATIONS_OF_TENSORFLOW = named("tf_graph", "tf_operations", "tf_tape")

LIMIT = 900.0  # on a busy machine


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize(
    ("size", "files"),
    [
        *[(2, REST), (2, TENSORFLOW)],
        *[(3, [path for path in REST if path not in LONG]), (3, OPERATIONS + OPERATIONS_OF_TENSORFLOW)],
        (4, MOVES_DATA),
    ],
    ids=["2", "2-tensorflow", "3", "3-tensorflow", "4"],
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
