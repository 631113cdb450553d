"""Programs written for Horovod, unmodified: what ``import horovod`` gives, and the programs themselves as jobs."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import hvdlite
from hvdlite.adapter import capabilities
from hvdlite.adapter.arguments import num_rank_is_power_2
from hvdlite.compat import finder, status
from hvdlite.compat.common import util
from hvdlite.compat.report import markdown
from hvdlite.compat.runner import run
from hvdlite.compat.settings_table import FLAGS, RANK_VARIABLES, VARIABLES
from hvdlite.compat.table import MODULES, NOTES, RESULTS
from hvdlite.errors import ArgumentError, CommunicationError, LaunchError, MissingPackageError, NotYetError
from hvdlite.launch.horovod import STARTUP, check_interpreter, job_environment
from hvdlite.launch.job.hosts import Host
from hvdlite.launch.job.mpi import Mpi, Placement, environment
from hvdlite.launch.worker.rank_environment import set_horovod_variables
from hvdlite.testing import on_ranks
from tests.support.hosts import hosts, why_not
from tests.support.jobs import LIMIT, PROGRAMS, ROOT, Ended, Start, run_each

API: dict[str, Any] = json.loads((ROOT / "tests/data/horovod_api.json").read_text())["modules"]


def python(*arguments: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run this Python, in which hvdlite can be found."""
    path = os.pathsep.join(filter(None, [(env or {}).get("PYTHONPATH"), str(ROOT)]))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **(env or {}), "PYTHONPATH": path},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def compat(*arguments: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return python("-m", "hvdlite.compat", *arguments, env=env, cwd=cwd)


@pytest.fixture
def horovod() -> Iterator[ModuleType]:
    """``import horovod`` in this process; at the end of the test nobody can any more."""
    finder.install()
    yield importlib.import_module("horovod")
    sys.meta_path.remove(finder.HorovodFinder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "horovod"]:
        del sys.modules[name]


# ---- jobs ----

WAYS = {
    "option": lambda program, *more: ("--horovod", "-np", "2", program, *more),
    "module": lambda program, *more: ("-np", "2", "python", "-m", "hvdlite.compat", program, *more),
}


FP16, ADASUM, UNIT = (
    *("horovod_digits.py --fp16-allreduce --max-norm 1.0", "horovod_digits.py --use-adasum"),
    "horovod_unit.py --verbose",
)
Ends = list[dict[str, tuple[int, str, str]]]
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}


def run_programs(folder: Path, way: str, *commands: str, **environ: str) -> Ends:
    """Run programs one after the other in one job. Return for each rank, by command: the exit code, stdout and stderr."""
    launch = ["-m", "hvdlite.launch", *WAYS[way]("")[:-1]]
    ends = run_each([f"tests/programs/{command}" for command in commands], folder, launch, **QUIET, **environ)
    assert len(ends) == 2
    assert all(code == 0 for each in ends for code, _, _ in each.values()), ends
    return [{command: each[f"tests/programs/{command}"] for command in commands} for each in ends]


@pytest.fixture(scope="module")
def torch_programs(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    return run_programs(tmp_path_factory.mktemp("torch"), "module", FP16, ADASUM, UNIT)


def program(start: Start, way: str, name: str) -> Ended:
    ended = start(*WAYS[way](str(PROGRAMS / name)), env=QUIET).end()
    assert ended.code == 0, ended.err + ended.out
    return ended


def result(ends: Ends, command: str) -> dict[str, float]:
    """What rank 0 printed as its last line: names and numbers. The other rank printed nothing."""
    out = ends[0][command][1]
    assert "ranks " not in ends[1][command][1]
    words = out.splitlines()[-1].split()
    return dict(zip(words[::2], map(float, words[1::2]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("command", [FP16, ADASUM])
def test_training_on_digits(torch_programs: Ends, command: str) -> None:
    seen = result(torch_programs, command)
    assert seen["ranks"] == 2 and seen["models"] == 1
    assert seen["accuracy"] > 0.9  # one class in ten is guessing
    assert 0 < seen["loss"] < 0.5


@pytest.mark.slow
def test_unit_tests(torch_programs: Ends) -> None:
    for end in torch_programs:
        err = end[UNIT][2]
        assert err.count("\nOK\n") == 1, err
        assert "FAILED" not in err and "skipped" not in err


@pytest.mark.slow
def test_keras_and_tensorflow(tmp_path: Path) -> None:
    command = f"horovod_tensorflow.py {tmp_path}"
    ends = run_programs(tmp_path, "option", "horovod_keras.py", command)
    seen = result(ends, "horovod_keras.py")
    assert seen["ranks"] == 2 and seen["models"] == 1 and seen["accuracy"] > 0.9
    out = ends[0][command][1]
    found = re.findall(r"^(\w+): ranks 2 accuracy ([\d.]+) models 1$", out, re.MULTILINE)
    assert [name for name, _ in found] == ["tape", "keras", "loaded", "session"], out
    assert all(float(accuracy) > 0.9 for _, accuracy in found)  # one class in ten is guessing


@pytest.mark.weekly
def test_tf_keras_as_keras_of_tensorflow(tmp_path: Path) -> None:
    ends = run_programs(tmp_path, "option", "horovod_keras.py", TF_USE_LEGACY_KERAS="1")
    seen = result(ends, "horovod_keras.py")
    assert seen["ranks"] == 2 and seen["models"] == 1 and seen["accuracy"] > 0.9


@pytest.mark.costly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_children_import_it_too(start: Start, way: str) -> None:
    lines = program(start, way, "horovod_children.py").out.splitlines()
    expected = [f"{method} horovod.common.exceptions True" for method in ("spawn", "fork", "forkserver")]
    for rank in "01":
        assert [line[4:] for line in lines if line.startswith(f"[{rank}]")] == [*expected, "subprocess 0.28.1"]


@pytest.mark.slow
def test_run_function(tmp_path: Path) -> None:
    done = compat(str(PROGRAMS / "horovod_run.py"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[(0, 2, 10.0), (1, 2, 10.0)]\n"), done.stderr


def test_other_commands_and_their_children_import_it(start: Start) -> None:
    ended = start(
        "--horovod", "-np", "2", "sh", "-c", f"{sys.executable} -c 'import horovod; print(horovod.run)'"
    ).end()
    assert ended.code == 0 and ended.out.count("<function run") == 2


@pytest.mark.costly
@pytest.mark.parametrize("way", WAYS)
def test_traceback_is_the_programs(start: Start, tmp_path: Path, way: str) -> None:
    (tmp_path / "fails.py").write_text("import horovod\n\n\ndef f():\n    raise KeyError('why')\n\n\nf()\n")
    ended = start(*WAYS[way](str(tmp_path / "fails.py"))).end()
    assert ended.code == 1 and "KeyError: 'why'" in ended.err
    assert ended.err.count('File "') == 2 and "hvdlite" not in ended.err.split("Traceback")[1]


def test_without_the_option_the_way_out_is_said(start: Start) -> None:
    ended = start("-np", "1", "python", "-c", "import horovod.torch as hvd").end()
    assert ended.code == 1
    assert re.search(
        r"No module named 'horovod'.*\n.*hvdliterun --horovod.*import hvdlite_torch as hvd", ended.err, re.S
    )


def test_place_of_ranks(start: Start) -> None:
    ended = start("--horovod", "-np", "2", str(PROGRAMS / "horovod_place.py")).end()
    assert ended.code == 0 and ended.out.count("agree") == 2, ended.err
    code = "import os; print([name for name in os.environ if name.startswith('HOROVOD')])"
    assert start("-np", "2", "--no-tag-output", "python", "-c", code).end().out == "[]\n[]\n"


@pytest.mark.costly
@pytest.mark.parametrize("where", ["node1:2,node2:2", "node1:1,node2:2"])
@pytest.mark.slow
def test_place_of_ranks_on_two_hosts(where: str) -> None:
    if reason := why_not():
        pytest.skip(reason)
    size = sum(int(host.rpartition(":")[2]) for host in where.split(","))
    with hosts(2) as two:
        words = ["-np", str(size), "-H", where, "--horovod", "--no-tag-output", str(PROGRAMS / "horovod_place.py")]
        done = two.run("node1", sys.executable, "-m", "hvdlite.launch", *words, timeout=LIMIT)
    expected = [f"node{number}" for number, slots in ((1, where[6]), (2, where[14])) for _ in range(int(slots))]
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"agree {rank} {host}" for rank, host in enumerate(expected)]


# ---- one process ----


def test_program_looks_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text((PROGRAMS / "show.py").read_text())
    facts = []
    for words in (["show.py", "a b", "-x"], ["-m", "show", "-m"]):
        plain, ours = python(*words, cwd=tmp_path), compat(*words, cwd=tmp_path)
        assert (plain.returncode, ours.returncode, ours.stderr) == (0, 0, "")
        facts.append(json.loads(ours.stdout))
        expected = json.loads(plain.stdout)
        expected["file"] = os.path.join(tmp_path, "show.py")
        assert facts[-1] == expected
    assert facts[0]["argv"] == ["show.py", "a b", "-x"]
    assert compat("-c", "import sys; print(sys.argv)", "q").stdout == "['-c', 'q']\n"


def test_exit_codes_and_errors_are_the_programs(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import horovod\n\n\ndef f():\n    1 / 0\n\n\nf()\n")
    plain = python("fails.py", cwd=tmp_path, env={"PYTHONPATH": STARTUP})
    ours = compat("fails.py", cwd=tmp_path)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout) == (1, "")
    assert ours.stderr.replace(str(tmp_path) + os.sep, "") == plain.stderr.replace(str(tmp_path) + os.sep, "")
    done = compat("-c", "import sys; sys.exit('the text')")
    assert (done.returncode, done.stderr) == (1, "the text\n")
    assert compat("-c", "import sys; sys.exit(7)").returncode == 7


def test_import_is_lazy() -> None:
    code = """
import sys
import horovod, horovod.common.util, horovod.common.exceptions
heavy = ["torch", "tensorflow", "keras", "hvdlite_torch", "hvdlite_tf", "mpi4py.MPI"]
print([name for name in heavy if name in sys.modules])
import horovod.torch
print([name for name in heavy if name in sys.modules])
"""
    assert compat("-c", code).stdout.splitlines() == ["[]", "['torch', 'hvdlite_torch']"]


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine that has a horovod, and a sitecustomize, of its own."""
    folder = tmp_path / "site"
    (folder / "horovod").mkdir(parents=True)
    (folder / "horovod" / "__init__.py").write_text("raise RuntimeError('the real one')")
    (folder / "horovod-0.1.dist-info").mkdir()
    (folder / "horovod-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.1\n")
    (folder / "sitecustomize.py").write_text("import sys\nsys.flavour = 'of this machine'\n")
    return {"PYTHONPATH": str(folder)}


def test_ours_comes_before_an_installed_one(installed: dict[str, str]) -> None:
    code = (
        "import horovod, sys, importlib.metadata as m; print(horovod.__version__, m.version('horovod'), sys.flavour, "
        f"{STARTUP!r} in sys.path)"
    )
    expected = "0.28.1 0.28.1 of this machine False\n"
    assert compat("-c", code, env=installed).stdout == expected
    assert python("-c", code, env=job_environment(installed)).stdout == expected
    done = python("-c", "import horovod", env=installed)  # and nothing is left behind
    assert done.returncode == 1 and "the real one" in done.stderr


def test_ours_comes_before_one_in_the_working_directory(tmp_path: Path, installed: dict[str, str]) -> None:
    code = "import horovod; print(horovod.__version__)"
    done = python("-c", code, env=job_environment({}), cwd=tmp_path / "site")
    assert done.stdout == "0.28.1\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected a program"),
        (["--nosuch"], "expected a program, not '--nosuch'"),
        (["nosuch.py"], "there is no program 'nosuch.py'"),
        (["-m"], "expected a module"),
        (["--report"], "expected the paths"),
        (["--report", "nosuch.py"], "there is no nosuch.py"),
    ],
)
def test_bad_command_lines(arguments: list[str], words: str) -> None:
    done = compat(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr and "Traceback" not in done.stderr


def test_help() -> None:
    done = compat("--help")
    assert done.returncode == 0 and "--report PATH" in done.stdout


# ---- what a job's environment is ----


def test_job_environment() -> None:
    assert job_environment({})["PYTHONPATH"] == STARTUP
    path = job_environment({"PYTHONPATH": "/a"})["PYTHONPATH"]
    assert path == f"{STARTUP}{os.pathsep}/a"
    assert job_environment({"PYTHONPATH": path})["PYTHONPATH"] == path
    assert Path(STARTUP, "sitecustomize.py").is_file()


@pytest.mark.parametrize("option", ["-I", "-E", "-S", "-uE"])
def test_interpreter_that_does_not_look(option: str) -> None:
    with pytest.raises(LaunchError, match="leave that option out"):
        check_interpreter(["python", "-u", option, "worker.py", "x.py"])
    check_interpreter(["python", "-W", "error", "-XIES", "worker.py", "-I"])


def place(rank: int, counts: str, local_rank: int, local_size: int) -> dict[str, str]:
    environ = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank)}
    environ |= {"OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size), "HVDLITE_HOROVOD": counts}
    set_horovod_variables(environ)
    return {name.removeprefix("HOROVOD_"): value for name, value in environ.items() if name in RANK_VARIABLES}


def test_place_on_several_hosts() -> None:
    # three hosts with 3, 1 and 2 ranks: rank 5 is the second on the third host, which is the second that has a second
    seen = place(5, "3,1,2", 1, 2)
    assert [seen[name] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")] == ["5", "6", "1", "2"]
    assert (seen["CROSS_RANK"], seen["CROSS_SIZE"]) == ("1", "2")
    assert (place(3, "3,1,2", 0, 1)["CROSS_RANK"], place(3, "3,1,2", 0, 1)["CROSS_SIZE"]) == ("1", "3")


def test_place_that_mpi_chose_otherwise() -> None:
    seen = place(1, "2,2", 0, 2)  # --map-by node
    assert (seen["RANK"], seen["LOCAL_RANK"], seen["LOCAL_SIZE"]) == ("1", "0", "2")
    assert "CROSS_RANK" not in seen and "CROSS_SIZE" not in seen


def test_hosts_are_filled_in_order() -> None:
    hosts = (Host("192.0.2.1", 2), Host("192.0.2.2", 4), Host("192.0.2.3", 4))
    assert Placement(5, hosts).rank_counts == [2, 3]
    assert Placement(3).rank_counts == [3]
    seen = environment(Mpi("openmpi", "mpirun", (5,)), Placement(5, hosts), job_environment({}))
    assert seen["HVDLITE_HOROVOD"] == "2,3"
    assert "HVDLITE_HOROVOD" not in environment(Mpi("openmpi", "mpirun", (5,)), Placement(5, hosts), {})


# ---- modules ----


@pytest.mark.parametrize("name", MODULES)
def test_modules_can_be_imported(horovod: ModuleType, name: str) -> None:
    module = importlib.import_module(name)
    assert module.__name__ == name and module.__doc__ is not None and Path(str(module.__file__)).is_file()
    missing = [each for each in MODULES[name].names if not hasattr(module, each)]
    assert missing == []


def test_modules_hold_what_ours_hold(horovod: ModuleType) -> None:
    import hvdlite
    import hvdlite_torch

    hvd = importlib.import_module("horovod.torch")
    assert hvd is sys.modules["horovod.torch"] is horovod.torch
    assert hvd.allreduce is hvdlite_torch.allreduce is hvd.mpi_ops.allreduce
    assert hvd.DistributedOptimizer is hvd.optimizer.DistributedOptimizer
    assert inspect.unwrap(hvd.DistributedOptimizer) is hvdlite_torch.DistributedOptimizer
    assert hvd.allgather is hvd.mpi_ops.allgather is not hvdlite_torch.allgather  # Horovod's gradient
    assert inspect.unwrap(hvd.allgather) is hvdlite_torch.allgather
    assert hvd.Compression is hvd.compression.Compression
    assert hvd.elastic.state.TorchState is hvd.elastic.TorchState
    common = importlib.import_module("horovod.common")
    assert common.exceptions.HorovodInternalError is hvd.HorovodInternalError is CommunicationError
    assert common.process_sets.global_process_set is hvdlite.global_process_set
    assert importlib.metadata.version("horovod") == "0.28.1"
    assert importlib.reload(hvd).rank is hvdlite.rank


def test_keras_modules(horovod: ModuleType) -> None:
    import hvdlite_tf

    for name in ("horovod.keras", "horovod.tensorflow.keras"):
        hvd = importlib.import_module(name)
        assert issubclass(hvd.callbacks.BroadcastGlobalVariablesCallback, hvdlite_tf.BroadcastGlobalVariablesCallback)
        assert inspect.unwrap(hvd.DistributedOptimizer) is hvdlite_tf.keras.DistributedOptimizer
        assert hvd.elastic.KerasState is hvdlite_tf.elastic.KerasState
    hvd = importlib.import_module("horovod.tensorflow")
    assert inspect.unwrap(hvd.DistributedOptimizer) is hvdlite_tf.DistributedOptimizer
    assert inspect.unwrap(hvd.allreduce) is inspect.unwrap(hvdlite_tf.allreduce)
    assert hvd.allreduce is hvd.mpi_ops.allreduce
    assert hvd.rank is hvdlite_tf.rank
    with pytest.raises(ModuleNotFoundError, match=r"horovod\._keras.* is not in hvdlite: .*hvd\.callbacks"):
        importlib.import_module("horovod._keras.callbacks")


def test_what_is_missing_is_explained(horovod: ModuleType) -> None:
    hvd = importlib.import_module("horovod.torch")
    where = "hvdlite docs from_horovod"
    with pytest.raises(AttributeError, match=rf"horovod\.torch\.nosuch is not in hvdlite\..*{where}"):
        _ = hvd.nosuch
    assert not hasattr(hvd, "nosuch") and getattr(hvd, "nosuch", 3) == 3
    with pytest.raises(ImportError, match=rf"horovod\.torch\.nosuch is not in hvdlite\..*{where}"):
        exec("from horovod.torch import nosuch")
    for statement in ("import horovod.mxnet", "from horovod import mxnet", "import horovod.mxnet.x as y"):
        with pytest.raises(ModuleNotFoundError, match=rf"horovod\.mxnet.* is not in hvdlite: MXNet is not.*{where}"):
            exec(statement)
    for statement in ("from horovod.run import run", "import horovod.run.runner"):
        with pytest.raises(ModuleNotFoundError, match=r"is a function now: `from horovod import run`"):
            exec(statement)
    with pytest.raises(ModuleNotFoundError, match="hvdliterun"):
        importlib.import_module("horovod.runner.launch")


def test_elastic_names(horovod: ModuleType) -> None:
    hvd = importlib.import_module("horovod.torch")
    common = importlib.import_module("horovod.common.elastic")
    assert hvd.elastic.ObjectState is common.ObjectState is hvdlite.elastic.ObjectState
    assert issubclass(hvd.elastic.TorchState, common.State)
    assert importlib.import_module("horovod.tensorflow").elastic.run is hvdlite.elastic.run

    def work() -> int:
        state = hvd.elastic.ObjectState(step=3)
        trained: int = common.run_fn(lambda state, more: state.step + more, reset=None)(state, 4)
        return trained

    assert on_ranks(2, work) == [7, 7]


# ---- names inside of Horovod that public code imports ----


def test_torch_optimizers_class(horovod: ModuleType) -> None:
    import torch

    def wrapped_optimizer() -> None:
        hvd = importlib.import_module("horovod.torch")
        inner = hvd.optimizer._DistributedOptimizer
        plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        assert not isinstance(plain, inner) and issubclass(inner, torch.optim.Optimizer)
        optimizer = hvd.DistributedOptimizer(plain)
        assert isinstance(optimizer, inner)

        class Mine(inner):  # type: ignore[misc, valid-type]
            def _allreduce_grad_async(self, p: Any) -> Any:
                return None

        assert not isinstance(optimizer, Mine)
        for cls in (inner, Mine):
            with pytest.raises(NotYetError, match=r"inner part of Horovod.*hvd\.DistributedOptimizer\(optimizer\)"):
                cls([torch.nn.Parameter(torch.ones(1))])
        with pytest.raises(NotYetError, match=r"cannot be replaced: hvdlite does not use it.*compression="):
            inner._allreduce_grad_async = Mine._allreduce_grad_async
        # What a program makes of its own methods and a plain class is its own.
        own = type("Own", (torch.optim.SGD,), dict(Mine.__dict__))([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        assert own._allreduce_grad_async(None) is None

    on_ranks(1, wrapped_optimizer)


def test_helpers_of_torch(horovod: ModuleType) -> None:
    operations = importlib.import_module("horovod.torch.mpi_ops")
    assert operations.handle_average_backwards_compatibility(None, None) is operations.Average
    assert operations._basics.mpi_built() is True


def test_helpers_of_tensorflow(horovod: ModuleType) -> None:
    import tensorflow as tf

    hvd = importlib.import_module("horovod.tensorflow")
    assert hvd._LegacyOptimizer is tf.compat.v1.train.Optimizer and issubclass(
        hvd._DistributedOptimizer, hvd._LegacyOptimizer
    )
    with pytest.raises(NotYetError, match=r"hvd\.DistributedOptimizer\(optimizer\)"):
        hvd._DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
    with pytest.raises(NotYetError, match=r"Differentiate hvd\.alltoall"):
        hvd.mpi_ops._alltoall_grad(None, None, None)
    assert (
        hvd.gpu_available is hvd.mpi_ops.gpu_available is importlib.import_module("horovod.common.util").gpu_available
    )
    assert hvd.mpi_ops._basics.mpi_built() is True

    def exchange() -> list[list[float]]:
        rank, size = float(hvd.rank()), hvd.size()
        assert isinstance(
            hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1)), hvd._DistributedOptimizer
        )
        assert hvd._allreduce(tf.fill([2], rank)).numpy().tolist() == [size * (size - 1) / 2] * 2
        assert hvd.mpi_ops._allreduce(tf.fill([2], rank), op=hvd.Max).numpy().tolist() == [size - 1.0] * 2
        combine = hvd._make_allreduce_grads_fn("g", "", "", hvd.Compression.none, False, hvd.Average, 1.0, 0)
        with pytest.raises(ArgumentError, match="Pass the variables too"):
            combine([None])
        variables = [tf.Variable([1.0]), tf.Variable([1.0])]
        mean, none = combine([tf.fill([1], rank), None], variables)
        assert none is None
        return [mean.numpy().tolist(), combine([tf.fill([1], rank)])[0].numpy().tolist()]

    assert on_ranks(2, exchange) == [[[0.5], [0.5]]] * 2


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (0, 1)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, (2, 3)),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "PMI_RANK": "0", "PMI_SIZE": "9"}, (1, 2)),
        ({"PMI_RANK": "1"}, "PMI_RANK is set and PMI_SIZE is not"),
        ({"PMI_RANK": "x", "PMI_SIZE": "9"}, "expected two numbers"),
    ],
)
def test_place_by_the_environment(
    horovod: ModuleType, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: Any
) -> None:
    for launcher in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
        monkeypatch.delenv(f"{launcher}_RANK", raising=False)
        monkeypatch.delenv(f"{launcher}_SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    env = importlib.import_module("horovod.runner.common.util.env")
    if isinstance(place, str):
        with pytest.raises(ArgumentError, match=place):
            env.get_env_rank_and_size()
    else:
        assert env.get_env_rank_and_size() == place


def test_cache(horovod: ModuleType) -> None:
    calls = []
    cached = importlib.import_module("horovod.common.util")._cache(lambda x: calls.append(x) or len(calls))
    assert [cached(1), cached(1), cached(2)] == [1, 1, 2] and calls == [1, 2]


# ---- horovod.common, horovod.run: Horovod's signatures, and what they do ----


def theirs(module: str) -> list[str]:
    return [f"{module}.{name}" for name, entry in API[module].items() if "parameters" in entry]


COMMON = [name for part in ("util", "exceptions", "basics") for name in theirs(f"horovod.common.{part}")]


@pytest.mark.parametrize("name", ["horovod.run", *COMMON])
def test_signatures(horovod: ModuleType, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    entry = API[module][attribute]
    pairs = [(getattr(importlib.import_module(module), attribute), entry["parameters"])]
    pairs += [(getattr(pairs[0][0], method), each["parameters"]) for method, each in entry.get("methods", {}).items()]
    for ours, parameters in pairs:
        if ours is CommunicationError:  # an exception takes what exceptions take
            continue
        seen = list(inspect.signature(ours).parameters.values())
        seen, more = seen[: len(parameters)], seen[len(parameters) :]
        assert all(each.default is not inspect.Parameter.empty for each in more), "Horovod's programs do not give these"
        assert [each.name for each in seen] == [each["name"] for each in parameters]
        for each, wanted in zip(seen, parameters, strict=True):
            if "default" in wanted:  # where Horovod has none, its programs cannot notice ours
                assert each.default == ast.literal_eval(wanted["default"]), each


def test_table_has_all_of_the_api() -> None:
    for module in MODULES.keys() & API.keys():
        public = {name.partition(".")[0] for name in API[module] if not name.startswith("_")}
        assert public <= set(MODULES[module].names), module


def test_basics(horovod: ModuleType) -> None:
    basics = importlib.import_module("horovod.common.basics").HorovodBasics(__file__, "mpi_lib")
    assert not basics.is_initialized()
    with pytest.raises(ValueError, match=r"init\(\) first"):
        basics.size()
    assert basics.mpi_built() is True and basics.gloo_built() is False


def test_init_whose_process_sets_are_refused(horovod: ModuleType) -> None:
    """The job has begun all the same, and the next `init` may add others."""
    hvd, basics = importlib.import_module("horovod.torch"), importlib.import_module("horovod.torch.mpi_ops")._basics
    assert basics.init is hvd.init is hvd.mpi_ops.init is importlib.import_module("horovod.tensorflow.mpi_ops").init

    def begin() -> None:
        everybody = [0, 1, 2]
        for wrong in ([[0], [1, 2], [0]], [everybody], [[1, 2], everybody], [[7]]):
            with pytest.raises(ValueError, match=r"ProcessSet\(process_set_id=None, ranks=.*, mpi_comm=None\)"):
                hvd.init(process_sets=[hvd.ProcessSet(each) for each in wrong])
            assert hvd.size() == 3
        assert basics._get_process_set_ids_and_ranks() == {0: everybody, 1: [0], 2: [1, 2]}
        first, pair = hvd.ProcessSet([0]), hvd.ProcessSet([2, 1])
        hvd.init(process_sets=[first, pair])
        hvd.init(process_sets=[pair])
        assert (first.process_set_id, pair.process_set_id) == (1, 2)
        assert basics._get_process_set_ids_and_ranks() == {0: everybody, 1: [0], 2: [1, 2]}
        hvd.remove_process_set(first)
        assert first.process_set_id is None
        assert str(pair) == f"ProcessSet(process_set_id={pair.process_set_id}, ranks=[1, 2], mpi_comm=None)"
        assert str(hvd.global_process_set) == "ProcessSet(process_set_id=0, ranks=[0, 1, 2], mpi_comm=None)"
        if pair.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2

    import torch

    on_ranks(3, begin)


def test_exceptions(horovod: ModuleType) -> None:
    exceptions = importlib.import_module("horovod.common.exceptions")
    assert exceptions.HostsUpdatedInterrupt(True).skip_sync is True
    error = exceptions.HorovodVersionMismatchError("torch", "1.0.0", "2.0.0")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "1.0.0", "2.0.0")
    assert "1.0.0" in str(error) and "2.0.0" in str(error)
    assert issubclass(exceptions.HorovodInternalError, RuntimeError)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_split_list(count: int) -> None:
    items = list(range(7))
    assert util.split_list(items, count) == [part.tolist() for part in np.array_split(items, count)]


def test_powers_of_two() -> None:
    assert [n for n in range(-2, 70) if num_rank_is_power_2(n)] == [1, 2, 4, 8, 16, 32, 64]


def test_versions() -> None:
    assert util.is_version_greater_equal_than("2.13.0+cpu", "2.6.0")
    assert util.is_version_greater_equal_than("2.6.0rc1", "2.6.0")
    assert not util.is_version_greater_equal_than("2.6.0", "2.13.0")
    for bad in ("2", "two", "2.6"):
        with pytest.raises(ValueError, match="three numbers"):
            util.is_version_greater_equal_than(bad, "2.6.0")
    util.check_installed_version("torch", "0.0.1")


def test_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPAT_SET", "before")
    monkeypatch.delenv("COMPAT_UNSET", raising=False)
    with util.env(COMPAT_SET=None, COMPAT_UNSET="now"):
        assert "COMPAT_SET" not in os.environ and os.environ["COMPAT_UNSET"] == "now"
    assert os.environ["COMPAT_SET"] == "before" and "COMPAT_UNSET" not in os.environ


def test_old_spelling_of_average() -> None:
    class Ops:
        Average, Sum = "the average", "the sum"

    handle = util.get_average_backwards_compatibility_fun(Ops)
    cases = [handle(None, None), handle(None, True), handle(None, False), handle("min", None)]
    assert cases == ["the average", "the average", "the sum", "min"]
    with pytest.raises(ValueError, match="old form"):
        handle("min", False)


def test_extensions(capsys: pytest.CaptureFixture[str]) -> None:
    assert util.extension_available("torch", verbose=True) and not util.extension_available("mxnet")
    assert "torch: installed" in capsys.readouterr().out
    assert util.gpu_available("torch") == (capabilities.cuda_built() or capabilities.rocm_built())
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib")
    with pytest.raises(MissingPackageError, match="mxnet"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")
    with pytest.raises(NotYetError):
        util.get_extension_full_path(__file__, "mpi_lib")
    assert util.get_ext_suffix().endswith((".so", ".pyd"))
    assert util.is_iterable([]) and not util.is_iterable(1)


def test_arguments_of_run_that_do_not_fit() -> None:
    for arguments, words in (
        ({"host_discovery_script": "x", "hosts": "localhost:2"}, "both name the hosts"),
        ({"reset_limit": 1}, "is for elastic jobs"),
    ):
        with pytest.raises(LaunchError, match=words):
            run(print, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="one of them at most"):
        run(print, use_gloo=True, use_mpi=True)
    for arguments in ({"network_interface": "a", "network_interfaces": "b"}, {"num_proc": 3, "np": 2}):
        with pytest.raises(ArgumentError, match="they mean the same"):
            run(print, **arguments)  # type: ignore[arg-type]
    with pytest.raises(
        ArgumentError, match="min_num_proc=2, num_proc=1: expected min_num_proc <= num_proc <= max_num_proc"
    ):
        run(print, np=1, min_np=2)
    with pytest.raises(LaunchError, match="has only 2 slots"):
        run(print, num_proc=3, hosts="localhost:2", network_interfaces=["lo", "eth0"])


# ---- status, and the page made of it ----


def test_status_of_names(horovod: ModuleType) -> None:
    assert status.of_name("horovod.torch.allreduce") == status.SUPPORTED
    assert status.of_name("horovod.torch.nosuch").kind == "missing"
    more = status.of_name("horovod.torch.join")
    assert more.kind == "supported" and "works with every operation" in more.note
    assert status.of_name("horovod.torch.Compression.fp16") == status.SUPPORTED
    assert status.of_name("horovod.torch.Compression.fp8").kind == "missing"
    assert status.of_name("horovod.run").kind == "changed"
    assert status.of_name("horovod.torch.elastic.run") == status.SUPPORTED
    assert status.of_name("horovod.keras.elastic.UpdateBatchStateCallback").kind == "changed"
    assert status.of_name("horovod.spark.run").kind == "missing"
    assert status.of_name("horovod.torch.DistributedOptimizer().nosuch").kind == "missing"
    assert status.of_argument("horovod.run", "np") == status.SUPPORTED
    assert "num_proc" in status.of_argument("horovod.run", "nosuch").note


def test_status_of_settings() -> None:
    assert status.of_variable("HOROVOD_FUSION_THRESHOLD") == status.SUPPORTED
    assert status.of_variable("HOROVOD_CYCLE_TIME").kind == "changed"
    assert status.of_variable("HOROVOD_ELASTIC").kind == "changed"
    assert status.of_variable("HOROVOD_NOSUCH").kind == "changed"
    assert status.of_flag("-np") == status.of_flag("--hostfile") == status.SUPPORTED
    assert status.of_flag("--mpi").kind == status.of_flag("--gloo").kind == "changed"
    assert status.of_flag("--min-np") == status.of_flag("--blacklist-cooldown-range") == status.SUPPORTED
    assert status.of_flag("--nosuch").kind == "missing"


@pytest.mark.parametrize(("function", "name"), [(call, name) for call, (_, names) in RESULTS.items() for name in names])
def test_methods_that_horovod_adds(function: str, name: str) -> None:
    assert status.of_name(f"{function}().{name}") == status.SUPPORTED


def test_a_framework_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise MissingPackageError("hvdlite_torch needs torch", "torch")

    monkeypatch.setattr("hvdlite.compat.modules.importlib.import_module", missing)
    for function in (status.of_name, status._contents):
        function.cache_clear()
    assert status.of_name("horovod.torch.rank") == status.Status("missing", "hvdlite_torch needs torch")
    status.of_name.cache_clear()


def test_notes_are_on_something() -> None:
    for name in (*NOTES, *RESULTS):
        module = max((each for each in MODULES if name == each or name.startswith(f"{each}.")), key=len)
        rest = name[len(module) + 1 :]
        assert rest in ("", *MODULES[module].names) or NOTES[name].status == "missing", name
    for name, note in {**VARIABLES, **{name: flag.note for name, flag in FLAGS.items()}}.items():
        assert note.text and not note.text.endswith("."), name


def test_page_is_up_to_date() -> None:
    page = (ROOT / "docs/from_horovod.md").read_text()
    _, _, rest = page.partition("<!-- table -->\n")
    assert rest.partition("\n<!-- end of table -->")[0].strip() == markdown().strip(), "run scripts/compat_table.py"
