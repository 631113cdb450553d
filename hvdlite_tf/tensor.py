"""How the core reads and makes TensorFlow's eager tensors and variables."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.protocols import Array, TensorInfo
from hvdlite.tensors.numpy_adapter import NumpyAdapter, check_dtype


class TensorFlowAdapter:
    """Dense eager tensors and variables."""

    def __init__(self) -> None:
        self._numpy = NumpyAdapter()

    def info(self, tensor: Any) -> TensorInfo:
        if isinstance(tensor, tf.IndexedSlices | tf.SparseTensor):
            raise UnsupportedTensorError(
                f"expected a dense tensor; got {type(tensor).__name__}. Use tf.convert_to_tensor(x)."
            )
        if not isinstance(tensor, tf.Variable) and not hasattr(tensor, "numpy"):
            raise UnsupportedTensorError(
                "expected an eager tensor; got a symbolic one: call this outside of tf.function."
            )
        return TensorInfo(self.dtype(tensor), tuple(tensor.shape))

    def dtype(self, tensor: Any) -> str:
        return _name(tensor.dtype)

    def cast(self, tensor: Any, dtype: str) -> Any:
        return tf.cast(tensor, dtype)

    def check_writable(self, tensor: Any) -> None:
        if not isinstance(tensor, tf.Variable):
            raise UnsupportedTensorError(
                "a TensorFlow tensor cannot be changed in place; use a tf.Variable, or the form that returns a new one."
            )

    def to_array(self, tensor: Any, *, wide: bool) -> Array:
        array = self._numpy.to_array(tensor.numpy(), wide=wide)
        # The array may share the tensor's memory, which TensorFlow holds to be immutable.
        array.flags.writeable = False
        return array

    def from_array(self, array: Array, dtype: str, like: Any) -> Any:
        if dtype == "bfloat16":
            array = self._numpy.from_array(array, dtype, _BFLOAT16)
        return tf.convert_to_tensor(array, dtype)

    def assign(self, tensor: Any, array: Array) -> None:
        tensor.assign(self.from_array(array, _name(tensor.dtype), tensor))


def plain_variable(variable: Any) -> Any:
    """The backend's variable inside of a Keras variable; anything else as it is."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def read(variable: Any) -> Any:
    """The value of a backend's variable, where no tape takes notice, and fast; anything else as it is."""
    if not isinstance(variable, tf.Variable):
        return variable
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype.base_dtype)


def has_value(variable: Any) -> bool:
    """Whether a backend's variable is initialized: one of TensorFlow that was made in a function may not be, if that failed."""
    return not isinstance(variable, tf.Variable) or bool(variable.is_initialized())


def _name(dtype: tf.DType) -> str:
    return check_dtype(np.dtype(dtype.as_numpy_dtype))


# Not made from a tensor: the first tensor starts TensorFlow's runtime, which a program may still want to configure.
_BFLOAT16 = np.empty(0, tf.bfloat16.as_numpy_dtype)

ADAPTER = TensorFlowAdapter()


def need_tensorflow(what: str) -> None:
    """Let pass what is made of TensorFlow's operations.

    Raises:
        ArgumentError: Keras has another backend.
    """
    name = keras.backend.backend()
    if name != "tensorflow":
        raise ArgumentError(
            f"{what} needs Keras on TensorFlow; its backend is {name}. Set KERAS_BACKEND=tensorflow before Keras is imported."
        )
