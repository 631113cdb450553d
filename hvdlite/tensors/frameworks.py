"""Imports the adapters of frameworks by name when a framework is in use, so that the core never imports a framework."""

from __future__ import annotations

import importlib
import sys
from typing import Any

ADAPTERS = {"torch": "hvdlite_torch.tensors.adapter", "tensorflow": "hvdlite_tf.tensor"}
"""For the top-level package of a tensor's class, the module whose ``ADAPTER`` reads such tensors."""


def framework_adapter(framework: str) -> Any:
    """Import the adapter of a framework and return it."""
    return importlib.import_module(ADAPTERS[framework]).ADAPTER


def loaded_adapter(framework: str) -> Any | None:
    """Return the adapter of a framework if this process has imported the framework; else None."""
    return framework_adapter(framework) if framework in sys.modules else None
