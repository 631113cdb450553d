"""Docstrings are true where a program can tell: the arguments that they describe exist, and operations are described once."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

import hvdlite
import hvdlite_tf
import hvdlite_tf.keras
import hvdlite_torch
from hvdlite.testing import on_ranks

# Ranks that are threads share TensorFlow's pool: it needs a thread for each rank that waits for the others.
tf.config.threading.set_inter_op_parallelism_threads(8)

ROOT = Path(__file__).parents[2]
OPERATIONS = (
    *("allgather", "allreduce", "alltoall", "barrier", "broadcast", "join", "reducescatter"),
    *("allgather_object", "broadcast_object"),
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def described(docstring: str) -> Iterator[str]:
    """The names of the arguments that the section "Args" of a docstring describes."""
    found = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", docstring, re.DOTALL | re.MULTILINE)
    for line in found[1].splitlines() if found else ():
        entry = re.match(r"    ([\w*][\w*, ]*):(?: |$)", line)
        if entry:
            yield from (name.strip().lstrip("*") for name in entry[1].split(","))


def parameters(function: Function) -> set[str]:
    """The names of a function's parameters."""
    given = function.args
    extra = [each for each in (given.vararg, given.kwarg) if each is not None]
    return {each.arg for each in [*given.posonlyargs, *given.args, *given.kwonlyargs, *extra]}


def taken_by(node: Function | ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str] | None:
    """The arguments of a function, or of a class: of its constructor or its fields. None if a base in another file has them."""
    if not isinstance(node, ast.ClassDef):
        return parameters(node)
    for each in node.body:
        if isinstance(each, Function) and each.name in ("__init__", "__new__"):
            return parameters(each)
    fields = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            inherited = taken_by(classes[base.id], classes)
            return None if inherited is None else inherited | fields
    return fields if node.decorator_list or not node.bases else None


@pytest.mark.parametrize("package", ["hvdlite", "hvdlite_torch", "hvdlite_tf"])
def test_the_arguments_that_are_described_exist(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        for node in ast.walk(tree):
            if isinstance(node, Function | ast.ClassDef):
                taken = taken_by(node, classes)
                names = described(ast.get_docstring(node) or "")
                unknown = [name for name in names if taken is not None and name not in taken]
                assert not unknown, f"{path}: the docstring of {node.name} describes {unknown}, which it does not take"


@pytest.mark.parametrize("module", [hvdlite_torch, hvdlite_tf, hvdlite_tf.keras], ids=lambda module: module.__name__)
def test_operations_are_described_by_the_core(module: object) -> None:
    """Each adapter's function refers to the core's of the same name, directly or by way of `hvdlite_tf`'s."""
    for name in OPERATIONS:
        if hasattr(module, name):
            text = inspect.getdoc(getattr(module, name)) or ""
            same = getattr(module, name) is getattr(hvdlite, name)
            assert same or f"`hvdlite.{name}`" in text or f"`hvdlite_tf.{name}`" in text, name


BEGINS = {"hvdlite": hvdlite, "np": np, "on_ranks": on_ranks}
OF_TORCH = {**BEGINS, "hvd": hvdlite_torch, "torch": torch}
OF_KERAS = {**BEGINS, "hvd": hvdlite_tf, "keras": keras, "tf": tf}
MODULES = {
    "hvdlite": BEGINS,
    "hvdlite.elastic": BEGINS,
    "hvdlite.checkpoint": BEGINS,
    "hvdlite.testing": BEGINS,
    "hvdlite_torch": OF_TORCH,
    "hvdlite_torch.elastic": OF_TORCH,
    "hvdlite_tf": OF_KERAS,
    "hvdlite_tf.callbacks": OF_KERAS,
    "hvdlite_tf.elastic": OF_KERAS,
    "hvdlite_tf.keras": {**OF_KERAS, "hvd": hvdlite_tf.keras},
}
"""What stands before the examples of a module, as the reference says."""

WITHOUT_EXAMPLE = {
    "hvdlite.serve": "it returns when a signal comes",
    **dict.fromkeys(("hvdlite.testing.LocalFabric", "hvdlite.testing.LocalTransport"), "`on_ranks` makes them"),
    "hvdlite.testing.Network": "its effect is time, which differs from run to run",
    **dict.fromkeys(
        [f"hvdlite_torch.{name}" for name in ("cuda_built", "mpi_built", "mpi_enabled", "nccl_built", "rocm_built")],
        "what it returns depends on the machine",
    ),
}
"""Why some public functions and classes have no example."""


@functools.cache
def public(module: str) -> dict[str, Any]:
    """The functions and classes of a module by their names, without errors, and without those of the modules before it."""
    loaded, found = importlib.import_module(module), {}
    known = [each for other in list(MODULES)[: list(MODULES).index(module)] for each in public(other).values()]
    for name in loaded.__all__:
        each = getattr(loaded, name)
        is_error = inspect.isclass(each) and issubclass(each, Exception)
        if (inspect.isroutine(each) or inspect.isclass(each)) and not is_error and each not in known:
            found[name] = each
    return found


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The examples of docstrings show what comes out."""
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(verbose=False)
    for name, each in public(module).items():
        for example in finder.find(each, f"{module}.{name}", module=False, globs=MODULES[module]):
            runner.run(example)
    assert runner.tries
    assert not runner.failures, capsys.readouterr().out


def has_example(documented: Any) -> bool:
    return "\nExamples:\n    >>> " in (inspect.getdoc(documented) or "")


@pytest.mark.parametrize("module", MODULES)
def test_everything_has_an_example(module: str) -> None:
    """A function that starts an operation may leave it to the function that waits for it."""
    without = set()
    for name, each in public(module).items():
        started = re.match(r"Start `(\w+)` and return a handle", inspect.getdoc(each) or "")
        if not has_example(each) and not (started and has_example(public(module)[started[1]])):
            without.add(f"{module}.{name}")
    assert without == {name for name in WITHOUT_EXAMPLE if name.rpartition(".")[0] == module}
