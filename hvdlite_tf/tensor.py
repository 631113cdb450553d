"""The adapter by which the core reads and makes TensorFlow's eager tensors and variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import Array, TensorInfo
from hvdlite.tensors.numpy_adapter import NumpyAdapter, check_dtype


class TensorFlowAdapter:
    """The adapter for dense eager tensors and variables. See `hvdlite.protocols.TensorAdapter`."""

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
        # The array may share the tensor's memory, and TensorFlow's tensors are immutable.
        array.flags.writeable = False
        return array

    def from_array(self, array: Array, dtype: str, like: Any) -> Any:
        if dtype == "bfloat16":
            array = self._numpy.from_array(array, dtype, _BFLOAT16)
        return tf.convert_to_tensor(array, dtype)

    def assign(self, tensor: Any, array: Array) -> None:
        tensor.assign(self.from_array(array, _name(tensor.dtype), tensor))


def _name(dtype: tf.DType) -> str:
    return check_dtype(np.dtype(dtype.as_numpy_dtype))


# This is not a tensor, because the first tensor starts TensorFlow's runtime, which the program may still configure.
_BFLOAT16 = np.empty(0, tf.bfloat16.as_numpy_dtype)

ADAPTER = TensorFlowAdapter()
