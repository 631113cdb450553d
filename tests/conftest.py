"""How a test runs on several ranks: as threads here, as processes where pytest itself runs under mpirun."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hvdlite.config
from hvdlite.testing import on_ranks
from tests.jobs import Start, Started

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# With several threads for each rank, most of torch's CPU time is spent in loops that wait for threads which have no core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # a machine with a GPU may lack it, and the tests there do without
    import hypothesis

    # Every process of an MPI run must draw the same examples.
    hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("same")

UNDER_MPI = "HVDLITE_TEST_MPI" in os.environ
"""Set by tests/test_under_mpirun.py, which runs tests/spmd once more with each rank a process."""

THREAD_RANKS = (1, 3)
"""Two ranks are those of `mpirun -n 2` (tests/test_under_mpirun.py): each test of tests/spmd runs there too. With --everything
threads are two ranks as well.
"""

FIRST = (
    "test_under_mpirun",
    *("test_launch", "test_faults", "test_failures", "test_out_of_step", "test_run_function", "test_channel"),
    *(
        "test_two_hosts",
        "test_elastic_jobs",
        "test_keras_training",
        "test_pages",
        "test_tf_strategy",
        "test_keras_backends",
        "test_keras_checks",
    ),
    *("test_benchmarks", "test_torch_models", "test_examples", "test_tf_data", "test_compat"),
)
"""The files that go first with `pytest -n 2`, so that no process is left with a long one in the end. The first one takes a
third of the time, on all cores. Meanwhile the other process runs jobs that wait more than they work. Then jobs of several ranks
and tests by threads are mixed: two jobs at once have more ranks than there are cores, and ranks that wait take time from
others.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--everything",
        action="store_true",
        help="run every test on every number of ranks, as threads and as processes: takes twice as long",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest -m gpu` does not look at other tests: a machine with a GPU may lack what they import."""
    only_gpu = config.option.markexpr == "gpu"
    return True if only_gpu and collection_path.is_file() and collection_path.parent.name != "gpu" else None


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest -n 2`: each file is one process's, in our order. A file shares its imports, fixtures and TensorFlow's state."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadfile"
        config.option.loadscopereorder = False
        # A process that has crashed is not replaced: the files that it had would be waited for without end.
        config.option.maxworkerrestart = "0"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Some files go first. Under mpirun, of a costly test only the first case stays: threads compare the cases."""
    place = {name: number for number, name in enumerate(FIRST)}
    if not UNDER_MPI:
        items.sort(key=lambda item: place.get(item.path.stem, len(FIRST)))
    elif not config.option.everything:
        seen: set[str] = set()
        left_out = []
        for item in items:
            test = item.nodeid.partition("[")[0]
            if test in seen and item.get_closest_marker("costly"):
                left_out.append(item)
            seen.add(test)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Under mpirun every rank has a folder of its own: in a common one each would clear away what another is clearing away."""
    if UNDER_MPI:
        folder = tempfile.TemporaryDirectory(prefix="hvdlite-rank-", ignore_cleanup_errors=True)
        config.option.basetemp = Path(folder.name) / "pytest"
        config.add_cleanup(folder.cleanup)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("ranks") or pytest.mark.ranks().mark
        if UNDER_MPI:
            hvdlite.init()
            size = hvdlite.size()
            skip = (
                [] if is_for(size, mark) else [pytest.mark.skip(f"the test is for other numbers of ranks than {size}")]
            )
            counts = [pytest.param(size, marks=skip)]
        else:
            everywhere = (1, 2, 3) if metafunc.config.option.everything else THREAD_RANKS
            chosen = [n for n in everywhere if is_for(n, mark)] or list(mark.args)
            counts = [pytest.param(n) for n in chosen]
        metafunc.parametrize("ranks", counts, indirect=True, ids=lambda n: f"{n}ranks")


def is_for(size: int, mark: pytest.Mark) -> bool:
    """Return whether a test with this ``ranks`` mark is for `size` ranks."""
    if mark.args:
        return size in mark.args
    return bool(mark.kwargs.get("at_least", 1) <= size <= mark.kwargs.get("at_most", size))


@pytest.fixture
def fresh_world() -> None:
    """Under mpirun: no rank knows any more of the optimizers of earlier tests. Threads have a new world in each test."""
    if UNDER_MPI:
        gc.collect()
        hvdlite.shutdown()
        hvdlite.init()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``ranks(fn, *args)`` calls ``fn(*args)`` on every rank and returns what each returned; fails if any rank fails."""
    if UNDER_MPI:
        return _on_processes
    n: int = request.param

    def run(fn: Callable[..., Any], *args: Any) -> list[Any]:
        return on_ranks(n, fn, *args, config=hvdlite.config.Config(deadlock_time_seconds=0.3, advice=False))

    return run


def _on_processes(fn: Callable[..., Any], *args: Any) -> list[Any]:
    result, failure = None, None
    try:
        result = fn(*args)
    except BaseException:
        failure = traceback.format_exc()
    # A rank that failed alone leaves the others waiting for it; they are told so after a moment, and come here too.
    outcomes = hvdlite.allgather_object((result, failure), name="outcome of a test")
    for rank, (_, failure) in enumerate(outcomes):
        assert failure is None, f"rank {rank}:\n{failure}"
    return [result for result, _ in outcomes]


@pytest.fixture(scope="module", autouse=True)
def what_is_there_stays() -> None:
    """TensorFlow keeps millions of objects of the functions that it has traced: `gc.collect` need not look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(*arguments)`` starts hvdliterun; at the end of the test nothing of it may be left."""
    jobs = []

    def begin(*arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> Started:
        jobs.append(Started(list(arguments), env, cwd))
        return jobs[-1]

    yield begin
    for job in jobs:
        left = job.processes()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        job.process.communicate()
        assert not left, "processes were left running"
