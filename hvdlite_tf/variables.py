"""Variables of Keras and of its backends. Nothing here imports TensorFlow, which Keras on torch does without."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import keras

from hvdlite.errors import ArgumentError, MissingPackageError

_ELSEWHERE = frozenset({"allgather", "allreduce", "alltoall", "broadcast", "broadcast_", "reducescatter"})
"""Operations that the core has for NumPy arrays and torch tensors."""


def is_installed() -> bool:
    """Whether TensorFlow is installed. It is not imported."""
    return importlib.util.find_spec("tensorflow") is not None


def missing(module: str, name: str) -> MissingPackageError:
    """The error for a name of `module` that needs TensorFlow where that is not installed."""
    way_out = "pip install 'hvdlite[tf]'"
    if name in _ELSEWHERE:
        way_out += f"; for NumPy arrays and torch tensors, hvdlite.{name.rstrip('_')} does without"
    return MissingPackageError(
        f"{module}.{name} needs tensorflow, which is not installed here: {way_out}.", name="tensorflow"
    )


def tensorflow() -> Any | None:
    """TensorFlow if this process has imported it; if not, nothing is of a class of TensorFlow's."""
    return sys.modules.get("tensorflow")


def is_slices(gradient: Any) -> bool:
    """Whether this is a tf.IndexedSlices: some rows of a gradient."""
    tf = tensorflow()
    return tf is not None and isinstance(gradient, tf.IndexedSlices)


def is_variable(value: Any) -> bool:
    """Whether this is a tf.Variable."""
    tf = tensorflow()
    return tf is not None and isinstance(value, tf.Variable)


def times(gradient: Any, factor: Any) -> Any:
    """A gradient multiplied by a number."""
    if is_slices(gradient):
        return type(gradient)(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def plain_variable(variable: Any) -> Any:
    """The backend's variable inside of a Keras variable; anything else as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def read(variable: Any) -> Any:
    """The value of a backend's variable, where no tape takes notice, and fast; anything else as it is."""
    tf = tensorflow()
    if tf is None or not isinstance(variable, tf.Variable):
        return variable
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype.base_dtype)


def has_value(variable: Any) -> bool:
    """Whether a backend's variable is initialized: one of TensorFlow that was made in a function may not be, if that failed."""
    return not is_variable(variable) or bool(variable.is_initialized())


def need_tensorflow(what: str) -> None:
    """Raise ArgumentError if `what`, which is made of TensorFlow's operations, is used on another backend of Keras."""
    name = keras.backend.backend()
    if name != "tensorflow":
        raise ArgumentError(
            f"{what} needs Keras on TensorFlow; its backend is {name}. Set KERAS_BACKEND=tensorflow before Keras is imported."
        )
