"""The frameworks' own adapters, imported by name where a framework is in use: the core never imports one."""

from __future__ import annotations

import importlib
import sys
from typing import Any

ADAPTERS = {"torch": "hvdlite_torch.tensors.adapter", "tensorflow": "hvdlite_tf.tensor"}
"""Top-level package that a tensor's class is defined in -> module whose ``ADAPTER`` reads it."""


def framework_adapter(framework: str) -> Any:
    """The adapter of a framework, which is imported now."""
    return importlib.import_module(ADAPTERS[framework]).ADAPTER


def loaded_adapter(framework: str) -> Any | None:
    """The adapter of a framework if this process has imported that; None if not."""
    return framework_adapter(framework) if framework in sys.modules else None
