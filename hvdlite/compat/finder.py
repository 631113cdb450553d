"""Who answers ``import horovod``: a finder that comes before all others.

The standard library only, and no import of the package at the top: every Python process of a job loads this file at its start
(see startup/sitecustomize.py), whether it goes on to import Horovod or not.
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
    """Finds ``horovod`` and all below it, as modules and as an installed distribution, and nothing else."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The spec of a module of Horovod's; None for other modules.

        Raises:
            ModuleNotFoundError: hvdlite has no such module of Horovod's; the text says what to do.
        """
        if fullname.partition(".")[0] != "horovod":
            return None
        return _modules().spec_of(fullname)  # type: ignore[no-any-return]

    @staticmethod
    def find_distributions(context: Any) -> Iterator[Distribution]:
        """For ``importlib.metadata.version("horovod")``."""
        if context.name is not None and context.name.lower() == "horovod":
            yield _modules().HorovodDistribution()

    @staticmethod
    def invalidate_caches() -> None:
        """There are none."""


def install() -> None:
    """Let ``import horovod`` mean hvdlite in this process. Modules of a real Horovod that are loaded already stay."""
    # By name: sitecustomize.py loads this file apart from the package, so that the class may be there twice.
    if not any(getattr(finder, "__name__", "") == HorovodFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, HorovodFinder)


def _modules() -> Any:
    try:
        return importlib.import_module("hvdlite.compat.modules")
    except ModuleNotFoundError as error:
        if error.name != "hvdlite":
            raise
    # hvdlite is not installed where this process looks: use it from where this file is.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    return importlib.import_module("hvdlite.compat.modules")
