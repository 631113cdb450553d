"""Variables of Keras and of its backends. This module does not import TensorFlow, because Keras on torch does not need it."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from hvdlite.checks import how_to_install
from hvdlite.errors import ArgumentError, MissingPackageError

_OWN = "_hvdlite_own"
_ELSEWHERE = frozenset({"allgather", "allreduce", "alltoall", "broadcast", "broadcast_", "reducescatter"})
"""The operations that the core also has for NumPy arrays and torch tensors."""


def is_installed() -> bool:
    """Return whether TensorFlow is installed, without importing it."""
    return importlib.util.find_spec("tensorflow") is not None


def missing(module: str, name: str) -> MissingPackageError:
    """Return the error for a name of `module` that needs TensorFlow, which is not installed."""
    way_out = how_to_install("tf")
    if name in _ELSEWHERE:
        way_out += f"; for NumPy arrays and torch tensors, hvdlite.{name.rstrip('_')} does without"
    return MissingPackageError(
        f"{module}.{name} needs tensorflow, which is not installed here: {way_out}.", name="tensorflow"
    )


def tensorflow() -> Any | None:
    """Return TensorFlow if this process has imported it; otherwise None, and then no object is of a class of TensorFlow."""
    return sys.modules.get("tensorflow")


def is_slices(gradient: Any) -> bool:
    """Return whether a gradient is a tf.IndexedSlices, which has some rows of a tensor."""
    tf = tensorflow()
    return tf is not None and isinstance(gradient, tf.IndexedSlices)


def is_variable(value: Any) -> bool:
    """Return whether a value is a tf.Variable."""
    tf = tensorflow()
    return tf is not None and isinstance(value, tf.Variable)


def times(gradient: Any, factor: Any) -> Any:
    """Return a gradient, dense or sparse, multiplied by a number, which may be a tensor of another dtype."""
    if is_slices(gradient):
        return type(gradient)(times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * (factor if isinstance(factor, int | float) else keras.ops.cast(factor, gradient.dtype))


def note_own(variables: Iterable[Any]) -> None:
    """Note that variables are a rank's own, such as gradients that it adds up: no rank gets those of another one."""
    for variable in variables:
        for each in (variable, plain_variable(variable)):
            setattr(each, _OWN, True)


def is_own(variable: Any) -> bool:
    """Return whether `note_own` was called with a variable."""
    return hasattr(variable, _OWN)


def plain_variable(variable: Any) -> Any:
    """Return the backend's variable inside a Keras variable; any other object unchanged."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def read(variable: Any) -> Any:
    """Return the value of a tf.Variable, by a fast read that no tape records; any other object unchanged."""
    tf = tensorflow()
    if tf is None or not isinstance(variable, tf.Variable):
        return variable
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype.base_dtype)


def has_value(variable: Any) -> bool:
    """Return whether a backend's variable is initialized. A tf.Variable is not, if the function that made it failed."""
    return not is_variable(variable) or bool(variable.is_initialized())


def need_tensorflow(what: str) -> None:
    """Raise ArgumentError if Keras has another backend than TensorFlow, whose operations `what` uses."""
    name = keras.backend.backend()
    if name != "tensorflow":
        raise ArgumentError(
            f"{what} needs Keras on TensorFlow; its backend is {name}. Set KERAS_BACKEND=tensorflow before Keras is imported."
        )


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an object of Keras have another attribute while the body runs. Keras' own `__setattr__` would track it."""
    missing = object()
    before = vars(owner).get(name, missing)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        object.__delattr__(owner, name) if before is missing else object.__setattr__(owner, name, before)
