"""The tests of tests/spmd once more, under plain mpirun, each rank a process.

As threads they run on one and three ranks, those of TensorFlow on two. What is left for processes to show: that each test holds
on two ranks that share nothing, and that what moves data between processes does so for other numbers of them: three, and four
with --everything. Of a costly test the first case shows it.
Each process takes seconds to import TensorFlow, and to trace its functions, so a part of its tests runs on two processes. With
--everything all of them do, and some on three.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, mpirun

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

# What is about messages and who is there, on two processes: with `pytest -n 2`.
QUICK = [
    *MESSAGES,
    *named("operations", "checks", "timeline", "messages", "communicator", "distributed_gradient"),
    *named("torch_gradients", "torch_training", "torch_join", "torch_async", "torch_elastic", "torch_distributed"),
]
FEW_TENSORFLOW = named("keras_sharded", "tf_operations", "tf_graph")

FEW = {
    "2": (2, QUICK),
    "2-tensorflow": (2, FEW_TENSORFLOW),
    "2-rest": (2, [path for path in REST if path not in [*QUICK, *LONG]]),
    "3": (
        3,
        [
            *MOVES_DATA,
            *ON_DEVICES_AND_SHARDS,
            *named("sync_batch_norm", "communicator", "torch_distributed", "torch_pipeline", "torch_async"),
        ],
    ),
}
"""For each job the number of ranks, and the files: those of ``pytest -n 2`` and ``--rest``."""
ALL = FEW | {
    "2-rest": (2, [path for path in REST if path not in QUICK]),
    "2-tensorflow-rest": (2, [path for path in TENSORFLOW if path not in FEW_TENSORFLOW]),
    "3": (3, [path for path in REST if path not in LONG]),
    "3-tensorflow": (3, named("keras_sharded", "tf_graph", "tf_operations", "tf_tape", "tf_tensors")),
    "4": (
        4,
        [*MOVES_DATA, *named("communicator", "torch_distributed", "torch_pipeline", "torch_slicing", "torch_group")],
    ),
}
"""The jobs of ``pytest --everything``."""
SOON = ("2",)
"""The jobs of ``pytest -n 2``."""


def marks_of(job: str) -> list[pytest.MarkDecorator]:
    """In which part of the tests a job is."""
    return [] if job in SOON else [pytest.mark.slow if job in FEW else pytest.mark.weekly]


LIMIT = 900.0  # on a busy machine


def failures(said: str) -> str:
    """What has failed in a job, in one line: pytest's summary has the first line of a failure."""
    return (
        ", ".join(sorted(set(re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", said, re.MULTILINE)))) or "no test has failed"
    )


@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("job", [pytest.param(job, marks=marks_of(job)) for job in ALL])
def test_spmd(job: str, pytestconfig: pytest.Config) -> None:
    everything = pytestconfig.option.everything
    size, files = (ALL if everything else FEW)[job]
    done = mpirun(
        size,
        *("-m", "pytest", "-x", "-q", "--timeout=150", "--color=no", "-p", "no:cacheprovider"),
        "--everything" if everything else "--quick",
        *map(str, files),
        timeout=LIMIT,
        HVDLITE_TEST_MPI="1",
        HVDLITE_DEADLOCK_TIME_SECONDS="0.3",
        HVDLITE_ADVICE="0",
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, f"{failures(done.stdout)}\n{done.stdout[-20_000:]}{done.stderr[-5_000:]}"
    assert done.stdout.count(" passed") == size
