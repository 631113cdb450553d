"""Docstrings are true where a program can tell: the arguments that they describe exist, and operations are described once."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hvdlite
import hvdlite_tf
import hvdlite_tf.keras
import hvdlite_torch
from hvdlite.testing import on_ranks

ROOT = Path(__file__).parent.parent
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


MODULES_WITH_EXAMPLES = ("hvdlite.api", "hvdlite.testing", "hvdlite.adapter.distributed_gradient")


@pytest.mark.parametrize("name", MODULES_WITH_EXAMPLES)
def test_examples(name: str) -> None:
    """The examples of docstrings show what comes out. The reference says what stands before them."""
    names = {"hvdlite": hvdlite, "np": np, "on_ranks": on_ranks}
    failed, tried = doctest.testmod(importlib.import_module(name), extraglobs=names)
    assert tried and not failed
