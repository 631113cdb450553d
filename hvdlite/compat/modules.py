"""This file makes the modules that ``import horovod…`` returns: plain module objects whose attributes are those of hvdlite.

A module is filled when it is imported, so ``import horovod.torch`` loads torch and not TensorFlow.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdlite.compat.table import HOROVOD_VERSION, MODULES, NOTES, Module, Note

_WHERE = "See hvdlite docs from_horovod, or: python -m hvdlite.compat --table"


def spec_of(name: str) -> ModuleSpec:
    """Return the spec of a module of Horovod.

    Args:
        name: The full name of the module, such as "horovod.torch.mpi_ops".

    Raises:
        ModuleNotFoundError: hvdlite has no such module. ``from horovod.torch import x`` raises this too if hvdlite has no x.
    """
    if f"{name}.".startswith("horovod.run."):
        raise ModuleNotFoundError(
            f"{name}: horovod.run was a module before Horovod 0.20, and is a function now: `from horovod import run`. {_WHERE}"
        )
    if name not in MODULES:
        # The error gets no `name=`: with it ``from horovod import x`` would replace this error by one without an explanation.
        raise ModuleNotFoundError(f"{missing(name)} {_WHERE}")
    loader: Any = _Loader()  # typeshed wants a subclass of an abstract class, which would add nothing
    spec = ModuleSpec(name, loader, origin=_file_of(MODULES[name]), is_package=True)
    spec.has_location = True  # so that it has a __file__: programs print it
    return spec


def missing(name: str) -> str:
    """Return a sentence about a name that hvdlite does not have. Horovod has it, or the program thinks so."""
    note = note_on(name)
    reason = f": {note.text}" if note is not None and note.status == "missing" else ""
    return f"{name} is not in hvdlite{reason}."


def note_on(name: str) -> Note | None:
    """Return the note on a full name, or else on the innermost module around it that has a note; None if none has."""
    while name:
        if name in NOTES:
            return NOTES[name]
        name = name.rpartition(".")[0]
    return None


class _Loader:
    """Fills a module of Horovod with the names of hvdlite's modules."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that Python makes an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names, and import the submodules that Horovod loads with it.

        Raises:
            MissingPackageError: The framework is not installed.
        """
        entry = MODULES[module.__name__]
        module.__doc__ = f"{module.__name__}, as hvdlite has it."
        names = contents(entry)
        module.__dict__.update(names)
        module.__dict__["__getattr__"] = _explain(module.__name__)
        for submodule in entry.loads:
            importlib.import_module(f"{module.__name__}.{submodule}")


def contents(entry: Module) -> dict[str, Any]:
    """Return the names that hvdlite has of a module of Horovod, with their values."""
    found: dict[str, Any] = {}
    for source in map(importlib.import_module, entry.sources):
        names = {*entry.names, *(getattr(source, "__all__", ()) if entry.whole else ())}
        found = {name: getattr(source, name) for name in names if hasattr(source, name)} | found
    return found


def _explain(module: str) -> Callable[[str], Any]:
    def __getattr__(name: str) -> Any:
        if name.startswith("__"):  # Python and its tools ask for many of these
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise AttributeError(f"{missing(f'{module}.{name}')} {_WHERE}")

    return __getattr__


def _file_of(entry: Module) -> str:
    """Return the ``__file__`` of a module of Horovod: the path of hvdlite's module that has its names.

    The path is made without importing that module: its framework may load slowly, or may not be installed.
    """
    root = Path(__file__).parent.parent.parent
    path = root.joinpath(*(entry.sources[0] if entry.sources else __package__ or "").split("."))
    return str(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


class HorovodDistribution(Distribution):
    """The distribution "horovod" for `importlib.metadata`: it has a name and a version, and no files."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of "METADATA"; None for any other file."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: horovod\nVersion: {HOROVOD_VERSION}\nSummary: hvdlite, under this name\n"

    def locate_file(self, path: Any) -> Path:
        """Return the path that a file of the distribution would have."""
        return Path(__file__).parent.joinpath(path)
