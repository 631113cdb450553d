"""hvdlite.run: a function in several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from hvdlite.compat.runner import run as horovod_run
from hvdlite.errors import ArgumentError, LaunchError, WorkerError
from hvdlite.launch.run_function import run

ROOT = Path(__file__).resolve().parents[2]


class OddError(Exception):
    """An exception with a constructor that pickle cannot repeat."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def rank_and_size(offset: int = 0, scale: int = 1) -> tuple[int, int]:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank * scale + offset, MPI.COMM_WORLD.size


def test_results_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(rank_and_size, args=(10,), kwargs={"scale": 2}, num_proc=2) == [(10, 2), (12, 2)]


def test_lambda_closure_and_output(capfd: pytest.CaptureFixture[str]) -> None:
    here = "closure"
    assert run(lambda: print(here) or here, np=2) == ["closure", "closure"]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] closure", "[1] closure"]


def test_large_result_and_argument() -> None:
    size = 100 * 2**20
    (result,) = run(lambda data: data + b"!", args=(bytes(size),), num_proc=1)
    assert len(result) == size + 1


def test_exception_comes_back_as_it_is() -> None:
    def fails() -> None:
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()
        if MPI.COMM_WORLD.rank == 1:
            raise FileNotFoundError(2, "no data", "train.csv")
        MPI.COMM_WORLD.Barrier()

    with pytest.raises(FileNotFoundError, match="train.csv") as caught:
        run(fails, num_proc=2)
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerError)
    assert "on rank 1" in str(cause) and "in fails" in str(cause) and "launch/run_function.py" not in str(cause)


def test_exception_that_cannot_travel() -> None:
    def fails() -> None:
        raise OddError("one", "two")

    with pytest.raises(WorkerError, match="OddError: one"):
        run(fails, num_proc=1)


def test_result_that_cannot_travel() -> None:
    with pytest.raises(WorkerError, match=r"rank 0's result, of type _thread\.lock, cannot be pickled"):
        run(threading.Lock, num_proc=1)


def test_no_result() -> None:
    with pytest.raises(WorkerError, match="left with sys.exit"):
        run(sys.exit, num_proc=1)


def test_killed_rank() -> None:
    with pytest.raises(WorkerError, match="was killed by SIGKILL"):
        run(lambda: os.kill(os.getpid(), 9), num_proc=2)


def test_function_of_main(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            from hvdlite.launch.run_function import run
            class Result:
                def __init__(self, value): self.value = value
            def work(): return Result(7)
            if __name__ == "__main__":
                print([result.value for result in run(work, num_proc=2)])
        """)
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[7, 7]\n", "")


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in (0, -1, 1.5, "2"):
        with pytest.raises(ArgumentError, match="expected a whole number from 1 on"):
            run(rank_and_size, num_proc=bad)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="they mean the same"):
        run(rank_and_size, num_proc=1, np=2)
    with pytest.raises(ArgumentError, match="both name the hosts"):
        run(rank_and_size, hosts="localhost:2", hostfile="hosts.txt")
    with pytest.raises(LaunchError, match="has only 2 slots"):
        run(rank_and_size, num_proc=3, hosts="localhost:2")
    monkeypatch.setenv("HVDLITE_CONTROL", "h:1:t")
    with pytest.raises(LaunchError, match="already a rank"):
        run(rank_and_size)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((print, 2), r"args=2: expected a list or tuple.*hvdlite\.run\(fn, num_proc=2\)\?"),
        ((print, None), "args=None: expected a list or tuple of the function's arguments\\.$"),
        ((print, (), 2), "kwargs=2: expected a dictionary"),
        (("train.py",), "expected a function; got a str. Start programs with hvdliterun"),
    ],
)
def test_arguments_in_the_wrong_place(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        run(*arguments)  # type: ignore[arg-type]


@pytest.mark.costly
@pytest.mark.parametrize("horovod", [False, True])
@pytest.mark.slow
def test_an_elastic_function_goes_on_after_a_failure(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], horovod: bool
) -> None:
    failed = tmp_path / "failed"

    def train(last: int) -> tuple[int, int, int]:
        import hvdlite as hvd
        from hvdlite import elastic

        hvd.init()

        @elastic.run
        def steps(state: elastic.ObjectState) -> int:
            began = state.step
            while state.step < last:
                state.step += int(hvd.allreduce(np.ones(1), op=hvd.Sum)[0]) // hvd.size()
                if hvd.rank() == 1 and state.step == 3 and not failed.exists():
                    failed.touch()
                    os._exit(5)
                state.commit()
            return began

        state = elastic.ObjectState(step=0)
        return hvd.rank(), steps(state), state.step

    if horovod:
        results = horovod_run(train, args=(5,), min_np=2, max_np=2, reset_limit=3)
    else:
        results = run(train, args=(5,), min_num_proc=2)
    began = results[0][1]
    assert began in (2, 3)  # rank 0 may have committed step 3 before it was ended
    assert results == [(0, began, 5), (1, began, 5)]
    assert "start again (number 1) with 2 ranks" in capfd.readouterr().err
    assert not list(Path("/dev/shm").glob(f"hvdlite.commits.{os.getpid()}.*"))


def test_an_elastic_function_that_cannot_go_on(tmp_path: Path) -> None:
    def fails() -> None:
        import hvdlite as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise FileNotFoundError(2, "no data", "train.csv")
        hvd.allreduce(np.ones(1))

    with pytest.raises(FileNotFoundError, match="train.csv"):
        run(fails, num_proc=2, max_num_proc=2, reset_limit=0)
    for wrong, words in (
        ({"reset_limit": 2}, "is for elastic jobs"),
        ({"min_num_proc": 2, "cooldown_range": (5, 1)}, "expected the shorter time first"),
    ):
        with pytest.raises(LaunchError, match=words):
            run(print, **wrong)  # type: ignore[arg-type]
    for sizes in (
        {"num_proc": 1, "min_num_proc": 2},
        {"num_proc": 3, "max_num_proc": 2},
        {"min_num_proc": 3, "max_num_proc": 2},
    ):
        with pytest.raises(ArgumentError, match="expected min_num_proc <= num_proc <= max_num_proc"):
            run(print, **sizes)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("min_num_proc", (0, -1, "2", 2.5, True), "a whole number from 1 on"),
        ("max_num_proc", (0, "2", 2.5), "a whole number from 1 on"),
        ("slots", (0, "3"), "a whole number from 1 on"),
        ("reset_limit", (-1, "1", 0.5), "a whole number from 0 on"),
        ("elastic_timeout", (0, -1, float("nan"), float("inf"), "60"), "a number of seconds above 0"),
        ("cooldown_range", (5, (5,), (1, 2, 3), (0, 5), ("1", "2")), "two numbers of seconds"),
        ("host_discovery_script", (5, ["./hosts"]), "a command"),
    ],
)
def test_elastic_arguments_that_cannot_be(name: str, values: tuple[object, ...], expected: str) -> None:
    for value in values:
        arguments = {"min_num_proc": 2, name: value}
        for start in (run, horovod_run) if name != "elastic_timeout" else (run,):
            with pytest.raises(ArgumentError, match=f"{name}=.*expected {expected}"):
                start(print, **arguments)  # type: ignore[arg-type,operator]
