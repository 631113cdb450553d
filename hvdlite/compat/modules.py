"""The modules that ``import horovod…`` gives: plain module objects whose attributes are ours.

Each is filled when it is imported, so that ``import horovod.torch`` loads torch and not TensorFlow.
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

_WHERE = "See docs/from_horovod.md, or: python -m hvdlite.compat --table"


def spec_of(name: str) -> ModuleSpec:
    """The spec of a module of Horovod's.

    Args:
        name: With all its packages, such as "horovod.torch.mpi_ops".

    Raises:
        ModuleNotFoundError: hvdlite has no such module; also where a name is imported that a module does not have.
    """
    if f"{name}.".startswith("horovod.run."):
        raise ModuleNotFoundError(
            f"{name}: horovod.run was a module before Horovod 0.20, and is a function now: `from horovod import run`. {_WHERE}"
        )
    if name not in MODULES:
        # Without `name=`: ``from horovod import x`` would drop this error and raise one that says nothing.
        raise ModuleNotFoundError(f"{missing(name)} {_WHERE}")
    loader: Any = _Loader()  # typeshed wants a subclass of an abstract class that would bring nothing
    spec = ModuleSpec(name, loader, origin=_file_of(MODULES[name]), is_package=True)
    spec.has_location = True  # so that it has a __file__: programs print it
    return spec


def missing(name: str) -> str:
    """What to say of a name that Horovod has, or is thought to have, and hvdlite has not."""
    note = note_on(name)
    reason = f": {note.text}" if note is not None and note.status == "missing" else ""
    return f"{name} is not in hvdlite{reason}."


def note_on(name: str) -> Note | None:
    """The note on a name, or else on what it is in."""
    while name:
        if name in NOTES:
            return NOTES[name]
        name = name.rpartition(".")[0]
    return None


class _Loader:
    """Fills a module from our own."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Python's ordinary module will do."""

    def exec_module(self, module: ModuleType) -> None:
        """Give it its names.

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
    """What a module of Horovod's has here, by name."""
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
    """A file to show as the module's: our module's own, without loading it (its framework may be slow, or not there)."""
    root = Path(__file__).parent.parent.parent
    path = root.joinpath(*(entry.sources[0] if entry.sources else __package__ or "").split("."))
    return str(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


class HorovodDistribution(Distribution):
    """What `importlib.metadata` is told of Horovod: that it is there, and which version."""

    def read_text(self, filename: str) -> str | None:
        """The metadata; no other file."""
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: horovod\nVersion: {HOROVOD_VERSION}\nSummary: hvdlite, under this name\n"

    def locate_file(self, path: Any) -> Path:
        """Where a file would be."""
        return Path(__file__).parent.joinpath(path)
