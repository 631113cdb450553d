"""Values between stages: nested eager tensors as bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdlite.adapter.pipeline.messages import Packed
from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import Array


class EagerTensorCodec:
    """Converts eager tensors in any nesting of lists, tuples and dicts."""

    def pack(self, values: Any) -> Packed:
        tensors = keras.tree.flatten(values)
        for tensor in tensors:
            if not isinstance(tensor, tf.Tensor):
                raise UnsupportedTensorError(
                    f"Pipeline: the output of a stage has a {type(tensor).__name__} in it, which does not go from rank to "
                    "rank: expected dense tensors, in lists, tuples and dicts."
                )
        arrays = [np.ascontiguousarray(tensor.numpy()) for tensor in tensors]
        numbers = iter(range(len(arrays)))
        structure = keras.tree.map_structure(lambda _: next(numbers), values)
        kinds = [(tuple(tensor.shape), tensor.dtype.name) for tensor in tensors]
        return Packed((structure, kinds), [array.reshape(-1).view(np.uint8) for array in arrays])

    def unpack(self, described: Any) -> tuple[Sequence[Array], Callable[[], Any]]:
        structure, kinds = described
        arrays = [np.empty(shape, tf.as_dtype(dtype).as_numpy_dtype) for shape, dtype in kinds]

        def values() -> Any:
            return keras.tree.map_structure(lambda number: tf.convert_to_tensor(arrays[number]), structure)

        return [array.reshape(-1).view(np.uint8) for array in arrays], values
