"""``hvd.serve``."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hvdlite.checks import require
from hvdlite.errors import ArgumentError
from hvdlite.serving.options import Options
from hvdlite.serving.servable import Servable

_PACKAGES = ("starlette", "uvicorn", "uvloop", "orjson", "msgpack", "prometheus_client")


Served = str | Callable[[Any], Any] | Servable


def serve(predict: Served | Mapping[str, Served], **settings: Any) -> None:
    """Serve a function over HTTP until SIGTERM or SIGINT comes.

    Args:
        predict: A function that takes a batch of inputs and returns as many outputs, what ``hvd.servable`` returns, or
            ``"module:name"`` of one of these; or a dictionary of several models by their names, each of which gets replicas of
            its own. The replicas are processes: a function is pickled by cloudpickle for them.
        settings: The attributes of `hvdlite.serving.options.Options`, such as ``replicas=2`` or ``max_batch=64``.

    Raises:
        ArgumentError: A setting has another name, or is out of its range.
        LaunchError: The port cannot be had, or the replicas cannot start.
        MissingPackageError: The extra "serve" is not installed.
    """
    names = [field.name for field in dataclasses.fields(Options)]
    if unknown := [name for name in settings if name not in names]:
        raise ArgumentError(f"serve: there is no setting {unknown[0]!r}; there are {', '.join(names)}.")
    for package in _PACKAGES:
        require(package, "serve", "hvdlite serve")
    from hvdlite.serving.server import Server

    options = Options(**settings)
    _log_to_stderr()
    Server(predict, options).run()


def _log_to_stderr() -> None:
    """Show what the server says, unless the program has set up its log."""
    logger = logging.getLogger("hvdlite.serving")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        is_terminal = sys.stderr.isatty()  # then a line is there that is written again and again
        handler.setFormatter(logging.Formatter(("\r\x1b[K" if is_terminal else "") + "hvdlite serve: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
