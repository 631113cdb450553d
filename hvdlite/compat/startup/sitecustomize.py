"""Python runs this file at its start if this folder is on PYTHONPATH, so the children of a program have the finder too.

Children made by multiprocessing's "spawn" and by subprocess begin as a new interpreter; hvdlite controls only their
environment. This file removes its folder from ``sys.path``, so that programs see the path that they would see without it. It
also runs the sitecustomize of the machine, which it hides.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType


def _install_finder(folder: str) -> None:
    loader = SourceFileLoader("_hvdlite_horovod_finder", os.path.join(os.path.dirname(folder), "finder.py"))
    module = ModuleType(loader.name)
    loader.exec_module(module)
    module.install()


def _run_hidden_sitecustomize() -> None:
    own = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, own)


_folder = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _folder]
_install_finder(_folder)
if __name__ == "sitecustomize":
    _run_hidden_sitecustomize()
