"""Finds the adapter that reads a tensor. NumPy's and the array API's adapters are here, the frameworks' in their packages.

A framework's adapter is imported when a tensor of that framework is seen, so that the core never imports one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import TensorAdapter
from hvdlite.tensors.array_api import ArrayApiAdapter
from hvdlite.tensors.device_registry import namespace_of
from hvdlite.tensors.frameworks import ADAPTERS, framework_adapter
from hvdlite.tensors.numpy_adapter import NumpyAdapter

_adapters: dict[type, TensorAdapter[Any]] = {}


def adapter_for(tensor: Any) -> TensorAdapter[Any]:
    """Return the adapter that reads tensors of the class of `tensor`.

    Raises:
        UnsupportedTensorError: hvdlite cannot read such an object.
    """
    kind = type(tensor)
    adapter = _adapters.get(kind)
    if adapter is None:
        adapter = _adapters[kind] = _find_adapter(tensor)
    return adapter


def _find_adapter(tensor: Any) -> TensorAdapter[Any]:
    if isinstance(tensor, np.ndarray | np.generic):
        return NumpyAdapter()
    for cls in type(tensor).__mro__:
        framework = cls.__module__.partition(".")[0]
        if framework in ADAPTERS:
            found: TensorAdapter[Any] = framework_adapter(framework)
            return found
    if any(cls.__name__ == "Tracer" and cls.__module__.partition(".")[0] == "jax" for cls in type(tensor).__mro__):
        raise UnsupportedTensorError(
            "this array has no values yet: JAX is tracing the function, for jit, grad or vmap. Call hvdlite outside of it, on "
            "what it returns; or inside by jax.experimental.io_callback, as hvdlite docs jax shows."
        )
    if hasattr(tensor, "__dlpack__") and namespace_of(tensor) is not None:
        return ArrayApiAdapter()
    raise UnsupportedTensorError(
        f"expected a NumPy array, a torch or TensorFlow tensor, or an array with DLPack and the array API "
        f"(JAX, CuPy); got {type(tensor).__module__}.{type(tensor).__qualname__}. "
        "Wrap numbers and lists as numpy.array(x) or torch.tensor(x); "
        "send other objects with broadcast_object or allgather_object."
    )


def device_kind_of(tensor: Any, adapter: Any) -> str | None:
    """Return the `Device.kind` of a tensor; None for host memory. An adapter without `device_kind` reads host memory only."""
    ask = getattr(adapter, "device_kind", None)
    kind: str | None = None if ask is None else ask(tensor)
    return kind


def register_adapter(kind: type, adapter: TensorAdapter[Any]) -> None:
    """Let `adapter` read tensors of class `kind`. Other packages use this for their own tensors.

    Raises:
        ArgumentError: `kind` is not a class.

    Examples:
        >>> from hvdlite.tensors.numpy_adapter import NumpyAdapter
        >>> class Column:
        ...     def __init__(self, values): self.values = values
        >>> class ColumnAdapter(NumpyAdapter):
        ...     def info(self, tensor): return super().info(tensor.values)
        ...     def to_array(self, tensor, *, wide): return super().to_array(tensor.values, wide=wide)
        ...     def from_array(self, array, dtype, like): return Column(super().from_array(array, dtype, like.values))
        >>> hvdlite.register_adapter(Column, ColumnAdapter())
        >>> on_ranks(2, lambda: hvdlite.allreduce(Column(np.ones(2)), hvdlite.Sum).values.tolist())
        [[2.0, 2.0], [2.0, 2.0]]
    """
    if not isinstance(kind, type):
        raise ArgumentError(f"expected a class; got {kind!r}.")
    _adapters[kind] = adapter
