"""Python runs this at its start where this folder is on PYTHONPATH: so children of a program know the finder too.

Children made by multiprocessing's "spawn" and by subprocess begin as a new interpreter, of which only the environment is
ours. The folder leaves ``sys.path`` at once, so that programs see the path that they would see without it; the machine's own
sitecustomize, which this one hides, is run.
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
