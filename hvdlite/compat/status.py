"""This file tells whether hvdlite has something of Horovod. It looks the name up in hvdlite, and adds the tables' notes."""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, Literal

from hvdlite.compat.modules import contents, note_on
from hvdlite.compat.settings_table import FLAGS, VARIABLES
from hvdlite.compat.table import MODULES, NOTES, RESULTS, Note
from hvdlite.config import Config
from hvdlite.errors import MissingPackageError
from hvdlite.launch import parser

_RENAMED_FLAGS = {"--mpi"}
"""Flags that hvdliterun and horovodrun both have, with different meanings."""


Kind = Literal["supported", "changed", "missing"]


@dataclass(frozen=True)
class Status:
    """Whether hvdlite has one thing that a program uses of Horovod.

    Attributes:
        kind: "supported": it works as in Horovod. "changed": it works in another way, or has no effect. "missing": hvdlite
            does not have it.
        note: How it differs, or what to do instead. If supported: what it does more than Horovod's, or empty.
    """

    kind: Kind
    note: str = ""


SUPPORTED = Status("supported")


@functools.cache
def of_name(name: str) -> Status:
    """Return the status of a module, function, class or constant, given by its full name.

    "()" in a name means what a function returns: "horovod.torch.DistributedOptimizer().synchronize" is a method of it.
    """
    note = note_on(name)
    try:
        _find(name)
    except MissingPackageError as error:
        return Status("missing", str(error))
    except AttributeError:
        return Status("missing", note.text if note is not None and note.status == "missing" else "hvdlite has none")
    exact = NOTES.get(name)
    return SUPPORTED if exact is None or exact.status == "missing" else _as_noted(exact)


def _as_noted(note: Note) -> Status:
    return Status("supported" if note.status == "more" else note.status, note.text)


def _module_of(name: str) -> str:
    """Return the module that a full name is in: the longest beginning of the name that is a module. Empty if there is none."""
    part = name
    while part not in MODULES:
        part = part.rpartition(".")[0]
        if not part:
            return ""
    return part


def _find(name: str) -> Any:
    """Return the object of hvdlite that has this full name of Horovod.

    Raises:
        MissingPackageError: The framework of the name is not installed.
        AttributeError: hvdlite has no such object.
    """
    call, dot, attribute = name.partition("().")
    if dot:
        module, _, result = RESULTS[call][0].rpartition(".")
        return getattr(getattr(importlib.import_module(module), result), attribute)
    module = _module_of(name)
    if not module:
        raise AttributeError(name)
    found: Any = SimpleNamespace(**_contents(module))
    for part in filter(None, name[len(module) + 1 :].split(".")):
        found = getattr(found, part)
    return found


@functools.cache
def _contents(module: str) -> dict[str, Any]:
    return contents(MODULES[module])


def of_argument(function: str, argument: str) -> Status:
    """Return the status of a keyword argument of a function. The status of the function itself must not be "missing"."""
    try:
        parameters = inspect.signature(_find(function)).parameters
    except (TypeError, ValueError):  # it is no function, or a function in C, which does not tell its arguments
        return SUPPORTED
    if argument in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return SUPPORTED
    return Status("missing", f"there it takes {', '.join(parameters) or 'no arguments'}")


def of_variable(name: str) -> Status:
    """Return the status of an environment variable, such as "HOROVOD_FUSION_THRESHOLD"."""
    if name.removeprefix("HOROVOD_").lower() in {field.name for field in fields(Config)}:
        return SUPPORTED
    if name not in VARIABLES:
        return Status("changed", "no effect: unknown to hvdlite, and to Horovod's documentation")
    return _as_noted(VARIABLES[name])


def of_flag(flag: str) -> Status:
    """Return the status of a flag of horovodrun, such as "--fusion-threshold-mb"."""
    if flag in parser.flags() - _RENAMED_FLAGS:
        return SUPPORTED
    if flag not in FLAGS:
        return Status("missing", "unknown to hvdliterun, and to horovodrun")
    return _as_noted(FLAGS[flag].note)
