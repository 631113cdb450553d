"""`Served`: what the servers hold of a model: its variables and the number of steps, as bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdlite.async_sgd.deal import ServerLayout
from hvdlite.async_sgd.rows import Rows
from hvdlite.async_sgd.training.gradients import slices
from hvdlite.protocols import Array, TensorInfo
from hvdlite.tensors.numpy_adapter import dtype_of


class Served:
    """The tensors that the servers hold. Their numbers are those of the variables; the last one is the number of steps.

    A schedule of learning rates needs the number of steps on each rank, so it is pulled like a variable.

    Args:
        variables: The variables that are trained.
        iterations: The optimizer's variable with the number of steps.

    Attributes:
        variables: The variables.
        counter: The number of the number of steps.
        infos, sizes: The dtype and shape, and the bytes, of each tensor.
    """

    def __init__(self, variables: Sequence[Any], iterations: Any) -> None:
        self.variables, self._iterations = list(variables), iterations
        self.counter = len(self.variables)
        self.infos = [TensorInfo(keras.backend.standardize_dtype(v.dtype), tuple(v.shape)) for v in self.variables]
        self.infos.append(TensorInfo("int64", ()))
        self.sizes = [dtype_of(info).itemsize * math.prod(info.shape) for info in self.infos]

    def tensor(self, number: int, data: Array) -> Array:
        """Return the bytes of a tensor, uint8, as an array of its dtype and shape in the same memory."""
        info = self.infos[number]
        return data.view(dtype_of(info)).reshape(info.shape)

    def tensors(self, data: Array, layout: ServerLayout) -> dict[int, Array]:
        """Return the tensors of a layout in the memory of a message, by their numbers."""
        return {number: self.tensor(number, each) for number, each in slices(data, layout, self.sizes).items()}

    def values(self, number: int, rows: Rows) -> Array:
        """Return the values of rows of a tensor, shape ``(rows, …)``, in the same memory."""
        info = self.infos[number]
        return rows.values.view(dtype_of(info)).reshape(len(rows.indices), *info.shape[1:])

    def dense(self, number: int, rows: Rows) -> Array:
        """Return rows of a tensor as the whole tensor, with zeros elsewhere."""
        whole = np.zeros(self.infos[number].shape, dtype_of(self.infos[number]))
        np.add.at(whole, rows.indices, self.values(number, rows))
        return whole

    def as_array(self, number: int, variable: Any) -> Array:
        """Return the present value of a variable that stands for a tensor. It may be a view."""
        return np.asarray(keras.ops.convert_to_numpy(variable), dtype_of(self.infos[number]))

    def read(self, number: int) -> Array:
        """Return the present value of a tensor. It may be a view."""
        return self.as_array(number, self._iterations if number == self.counter else self.variables[number])

    def assign(self, number: int, value: Any) -> None:
        """Give a tensor a value: an array, or a tensor of Keras' backend."""
        target = self._iterations if number == self.counter else self.variables[number]
        target.assign(value)
