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
from hvdlite.comm.mpi.start import start_mpi
from hvdlite.testing import on_ranks
from tests.support import selection
from tests.support.jobs import Start, Started
from tests.support.leftovers import Leftovers

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# With several threads for each rank, most of torch's CPU time is spent in loops that wait for threads which have no core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # a machine with a GPU may lack it, and the tests there do without
    import hypothesis

    # Every process of an MPI run must draw the same examples.
    hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("same")

UNDER_MPI = "HVDLITE_TEST_MPI" in os.environ
"""Set by tests/project/test_under_mpirun.py, which runs tests/spmd once more with each rank a process."""

if (
    "HVDLITE_TEST_SOCKETS" in os.environ
):  # tests/launch/test_two_hosts.py: everything between hosts goes by sockets, however small
    import hvdlite.comm.sockets.collectives

    hvdlite.comm.sockets.collectives.LARGE_BYTES = 1

THREAD_RANKS = (1, 3)
"""Two ranks are those of `mpirun -n 2` (tests/project/test_under_mpirun.py): each test of tests/spmd runs there too. With
--everything threads are two ranks as well.
"""
OF_TENSORFLOW = (2, 3, 1)
"""On how many ranks a test of TensorFlow runs: the first of these that it is for. With --everything it runs on each."""


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest -m gpu` does not look at other tests: a machine with a GPU may lack what they import."""
    only_gpu = config.option.markexpr == "gpu"
    return True if only_gpu and collection_path.is_file() and collection_path.parent.name != "gpu" else None


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest -n 2`: each file is one process's, for it shares its imports, fixtures and TensorFlow's state."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "loadfile"
        config.option.loadscopereorder = False
        # A process that has crashed is not replaced: the files that it had would be waited for without end.
        config.option.maxworkerrestart = "0"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return selection.scheduler(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    if not UNDER_MPI and not session.config.pluginmanager.has_plugin("dsession"):
        start_mpi()  # it leaves no file in /dev/shm, and the import of mpi4py by a test does


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection.choose(config, items, UNDER_MPI)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Under mpirun every rank has a folder of its own: in a common one each would clear away what another is clearing away."""
    selection.settle(config)
    if UNDER_MPI:
        folder = tempfile.TemporaryDirectory(prefix="hvdlite-rank-", ignore_cleanup_errors=True)
        config.option.basetemp = Path(folder.name) / "pytest"
        config.add_cleanup(folder.cleanup)
    elif not hasattr(config, "workerinput"):
        config.pluginmanager.register(Leftovers())
        if config.option.renew_durations:
            config.pluginmanager.register(selection.Durations())


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
            if few := selection.needs_tensorflow(metafunc.definition.path) and everywhere is THREAD_RANKS:
                everywhere = OF_TENSORFLOW
            chosen = [n for n in everywhere if is_for(n, mark)][: 1 if few else None] or list(mark.args)
            # What holds on several ranks is quick, and what one rank alone does is left to the rest.
            counts = [pytest.param(n, marks=pytest.mark.slow if n != max(chosen) else ()) for n in chosen]
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
