"""``import hvdlite`` is light."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    code = f"import sys, hvdlite.launch.cli; print([n for n in {HEAVY} if n in sys.modules and 'launch' not in n])"
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
    assert f"'hvdlite[{extra}]'" in done.stdout
