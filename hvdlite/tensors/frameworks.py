"""Imports the frameworks' adapters by name when a framework is in use, so that the core never imports an adapter itself."""

from __future__ import annotations

import importlib
import sys
from typing import Any

ADAPTERS = {"torch": "hvdlite_torch.tensors.adapter", "tensorflow": "hvdlite_tf.tensor"}
"""The module whose ``ADAPTER`` reads a tensor, by the top-level package that defines the tensor's class."""


def framework_adapter(framework: str) -> Any:
    """Return the adapter of a framework, and import it if need be."""
    return importlib.import_module(ADAPTERS[framework]).ADAPTER


def loaded_adapter(framework: str) -> Any | None:
    """Return the adapter of a framework if this process has imported the framework; else None."""
    return framework_adapter(framework) if framework in sys.modules else None
