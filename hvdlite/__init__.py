"""Data-parallel training in one line, over MPI.

``import hvdlite`` loads no framework and does not start MPI; `init` starts it. The functions here take NumPy arrays, tensors of
torch and TensorFlow, and arrays with DLPack, and return arrays of the same kind. `hvdlite.basics` lists the names that all
packages of hvdlite have, and `hvdlite.adapter.plain` those of this one.

These names are loaded when a program asks for the first of them. It takes a quarter of a second, most of it for NumPy, which
hvdliterun does not need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hvdlite.adapter import guide

if TYPE_CHECKING:
    from hvdlite import basics, checkpoint, elastic
    from hvdlite.adapter import plain
    from hvdlite.adapter.plain import *  # noqa: F403
    from hvdlite.basics import *  # noqa: F403
    from hvdlite.launch.run_function import run
    from hvdlite.serving.servable import servable
    from hvdlite.serving.serve import serve

    __all__ = ["checkpoint", "elastic", "run", "servable", "serve"]
    __all__ += plain.__all__
    __all__ += basics.__all__

__version__ = "0.1.0"

if not TYPE_CHECKING:
    # A training process imports neither the launcher nor the server.
    _ELSEWHERE = {"run": "launch.run_function", "servable": "serving.servable", "serve": "serving.serve"}
    _ROOMS = ("checkpoint", "elastic")

    def __getattr__(name: str) -> Any:
        if name in _ROOMS:
            return importlib.import_module(f"hvdlite.{name}")
        if name in _ELSEWHERE:
            return getattr(importlib.import_module(f"hvdlite.{_ELSEWHERE[name]}"), name)
        if name.startswith("__") and name != "__all__":  # Python and its tools ask for many of these
            raise AttributeError(f"module 'hvdlite' has no attribute {name!r}")
        if "__all__" not in globals():
            homes = [importlib.import_module(f"hvdlite.{home}") for home in ("basics", "adapter.plain")]
            found = {each: getattr(home, each) for home in homes for each in home.__all__}
            globals().update(
                {"__all__": [*_ROOMS, *_ELSEWHERE, *found], **found} | globals()
            )  # what a program has replaced stays
        if name in globals():  # one of these names, or a module that was loaded with them
            return globals()[name]
        raise AttributeError(guide.advice_on(name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})


guide.install()
