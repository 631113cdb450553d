"""The tests of tests/spmd once more, under plain mpirun, each rank a process.

As threads they run on one and three ranks. What is left for processes to show: that each test holds on two ranks that share
nothing, and that what moves data between processes does so for other numbers of them (three, and four).
Each process takes seconds to import TensorFlow, so its tests run on two processes alone, except with --everything.
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
MESSAGES = named("adasum", "join", "order", "overlap", "process_sets", "schedule", "sharded", "torch_operations")
MOVES_DATA = [*MESSAGES, *named("operations", "checks", "timeline", "torch_gradients", "torch_join", "torch_training")]
ON_DEVICES_AND_SHARDS = named("device_gradients", "device_operations", "distributed_gradient", "sharded_state")

FEW = {
    "2": (2, REST),
    "2-tensorflow": (2, TENSORFLOW),
    "3": (
        3,
        [
            *MOVES_DATA,
            *ON_DEVICES_AND_SHARDS,
            *named("sync_batch_norm", "communicator", "message_sizes"),
            *named("torch_distributed", "torch_pipeline", "torch_slicing"),
            *named(
                "torch_checkpoint",
                "torch_pipeline_steps",
                "torch_wavefront",
                "torch_split",
                "torch_few_bytes",
                "torch_local_steps",
                "torch_async",
                "torch_hogwild",
            ),
        ],
    ),
    "4": (
        4,
        named(
            "join",
            "overlap",
            "process_sets",
            "schedule",
            "sharded",
            "torch_distributed",
            "torch_pipeline",
            "torch_operations",
        ),
    ),
}
"""For each job the number of ranks, and the files."""
ALL = FEW | {
    "3": (3, [path for path in REST if path not in LONG]),
    "3-tensorflow": (3, named("keras_sharded", "tf_graph", "tf_operations", "tf_tape", "tf_tensors")),
    "4": (
        4,
        [*MOVES_DATA, *named("communicator", "torch_distributed", "torch_pipeline", "torch_slicing", "torch_group")],
    ),
}
"""The jobs of ``pytest --everything``."""

LIMIT = 900.0  # on a busy machine


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("job", FEW)
def test_spmd(job: str, pytestconfig: pytest.Config) -> None:
    everything = ["--everything"] if pytestconfig.option.everything else []
    size, files = (ALL if everything else FEW)[job]
    done = mpirun(
        size,
        *("-m", "pytest", "-x", "-q", "--timeout=150", "--color=no", "-p", "no:cacheprovider"),
        *everything,
        *map(str, files),
        timeout=LIMIT,
        HVDLITE_TEST_MPI="1",
        HVDLITE_DEADLOCK_TIME_SECONDS="0.3",
        HVDLITE_ADVICE="0",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    assert done.stdout.count(" passed") == size
