"""``import hvdlite`` is light."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hvdlite.checks import how_to_install

HEAVY = ["torch", "tensorflow", "mpi4py.MPI", "keras", "jax", "cupy", "hvdlite.launch", "hvdlite.testing", "matplotlib"]


def test_import_loads_no_framework_and_starts_no_mpi() -> None:
    code = f"import sys, hvdlite; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_everything_public_is_there() -> None:
    import hvdlite
    import hvdlite_torch

    for module in (hvdlite, hvdlite_torch):
        for name in module.__all__:
            assert getattr(module, name) is not None
            if callable(getattr(module, name)):
                assert getattr(module, name).__doc__, f"{module.__name__}.{name} has no docstring"


def test_the_launcher_imports_no_framework() -> None:
    names = [name for name in (*HEAVY, "numpy") if "launch" not in name]
    code = f"import sys, hvdlite.launch.cli; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("adapter", "package", "extra"), [("hvdlite_torch", "torch", "torch"), ("hvdlite_tf", "keras", "tf")]
)
def test_a_missing_framework_names_the_extra_that_brings_it(adapter: str, package: str, extra: str) -> None:
    code = f"""
import importlib.util, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == {package!r} else real(name, *more)
try:
    import {adapter}
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert f"{adapter} needs {package}" in done.stdout
    assert how_to_install(extra) in done.stdout


@pytest.mark.parametrize(
    ("statement", "kind", "words"),
    [
        ("import hvdlite.torch as hvd", ModuleNotFoundError, r"write `import hvdlite_torch as hvd`"),
        ("from hvdlite import keras", ModuleNotFoundError, r"no 'keras': write `import hvdlite_tf as hvd`"),
        (
            "from hvdlite import DistributedOptimizer",
            ModuleNotFoundError,
            "no 'DistributedOptimizer'.*`import hvdlite_tor",
        ),
        (
            "import hvdlite; hvdlite.DistributedOptimizer",
            AttributeError,
            "no 'DistributedOptimizer'.*`import hvdlite_torch",
        ),
        ("import hvdlite; hvdlite.world_size", AttributeError, r"no attribute 'world_size': it is called size\(\)"),
        (
            "import hvdlite_torch; hvdlite_torch.get_rank",
            AttributeError,
            r"no attribute 'get_rank': it is called rank\(\)",
        ),
        ("import hvdlite; hvdlite.__nosuch__", AttributeError, "no attribute '__nosuch__'"),
        ("import hvdlite.comm.nosuch", ModuleNotFoundError, r"No module named 'hvdlite\.comm\.nosuch'"),
        ("import nosuch", ModuleNotFoundError, "No module named 'nosuch'"),
    ],
)
def test_what_is_looked_for_in_the_wrong_package(statement: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        exec(statement)


def test_names_can_be_asked_for() -> None:
    import hvdlite

    assert not hasattr(hvdlite, "DistributedOptimizer") and callable(hvdlite.run)
