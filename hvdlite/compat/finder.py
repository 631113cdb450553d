"""A finder that answers ``import horovod``. It comes before all other finders of Python.

This file imports only the standard library at its top, and nothing of the package: every Python process of a job loads it at
its start (see startup/sitecustomize.py), whether the process imports Horovod later or not.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import Distribution


class HorovodFinder:
    """Finds ``horovod`` and its submodules, and the installed distribution "horovod". It finds nothing else."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module of Horovod; None for other modules.

        Raises:
            ModuleNotFoundError: hvdlite does not have this module of Horovod. The error says what to do.
        """
        if fullname.partition(".")[0] != "horovod":
            return None
        return _modules().spec_of(fullname)  # type: ignore[no-any-return]

    @staticmethod
    def find_distributions(context: Any) -> Iterator[Distribution]:
        """Yield the distribution "horovod" if it is asked for: ``importlib.metadata.version("horovod")`` works."""
        if context.name is not None and context.name.lower() == "horovod":
            yield _modules().HorovodDistribution()

    @staticmethod
    def invalidate_caches() -> None:
        """Do nothing: the finder has no caches. Python calls this on every finder."""


def install() -> None:
    """Let ``import horovod`` mean hvdlite in this process. Modules of a real Horovod that are loaded already stay."""
    # Classes are compared by name: sitecustomize.py loads this file apart from the package, so the class may exist twice.
    if not any(getattr(finder, "__name__", "") == HorovodFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, HorovodFinder)


def _modules() -> Any:
    try:
        return importlib.import_module("hvdlite.compat.modules")
    except ModuleNotFoundError as error:
        if error.name != "hvdlite":
            raise
    # hvdlite is not on the path of this process: add the folder from which this file was loaded.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    return importlib.import_module("hvdlite.compat.modules")
