"""`KerasReplica`: the variables that an optimizer of Keras trains, for a training with a parameter server."""

from __future__ import annotations

import json
from typing import Any, BinaryIO

import numpy as np

from hvdlite.async_sgd.compensation import DelayCompensation
from hvdlite.async_sgd.deal import ServerLayout
from hvdlite.async_sgd.rows import Rows
from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array
from hvdlite.tensors.numpy_adapter import dtype_of
from hvdlite_tf.async_sgd.part import KerasPart
from hvdlite_tf.async_sgd.served import Served


class KerasReplica:
    """A `hvdlite.async_sgd.training.replica.Replica` of Keras.

    Args:
        optimizer: The program's optimizer, which is built.
        keeps: Whether `save` will be called, perhaps while the backend gives new values to variables.

    Attributes:
        served: What the servers hold.
        rate: The learning rate of the next push.
        names, sizes, clipping: See `Replica`.
    """

    clipping = "clipnorm=1.0 in the optimizer"

    def __init__(self, optimizer: Any, keeps: bool) -> None:
        self._optimizer, self._keeps = optimizer, keeps
        self._kept: dict[int, Array] = {}
        self.served = Served(optimizer._trainable_variables, optimizer._iterations)
        self._paths = [str(getattr(v, "path", v.name)) for v in self.served.variables]
        self.names = [*map(repr, self._paths), "the number of steps"]
        self.sizes = self.served.sizes
        self.rate = 0.0
        self._numbers = [
            name
            for name, value in optimizer.get_config().items()
            if name not in ("learning_rate", "loss_scale_factor", "global_clipnorm")
            and isinstance(value, int | float | None)
            and not isinstance(value, bool)
            and hasattr(optimizer, name)
        ]

    def part(self, layout: ServerLayout, compensation: DelayCompensation) -> KerasPart:
        """See `Replica`."""
        return KerasPart(self._optimizer, self.served, layout, compensation)

    def settings(self) -> bytes:
        """Return the learning rate and the other numbers in the optimizer's configuration, as JSON."""
        numbers = {name: getattr(self._optimizer, name) for name in self._numbers}
        return json.dumps({"learning_rate": self.rate, **numbers}).encode()

    def rows(self, number: int, indices: Array, values: Array) -> Rows:
        """Return a sparse gradient as rows, in memory of their own.

        Args:
            number: The number of the variable.
            indices: The numbers of the rows: whole numbers, shape ``(rows,)``. One may come more than once.
            values: Their elements: shape ``(rows, …)``.

        Raises:
            ArgumentError: The rows have another shape than those of the variable.
        """
        info = self.served.infos[number]
        self._check(number, values.shape, (len(indices), *info.shape[1:]))
        elements = np.ascontiguousarray(values, dtype_of(info)).reshape(-1).view(np.uint8)
        return Rows(indices.astype(np.int64), elements.copy())

    def dense(self, number: int, gradient: Array) -> Array:
        """Return a gradient.

        Raises:
            ArgumentError: It has another shape than its variable.
        """
        self._check(number, gradient.shape, self.served.infos[number].shape)
        return gradient

    def _check(self, number: int, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            raise ArgumentError(f"the gradient of {self.names[number]} has the shape {found}: expected {expected}.")

    def is_finite(self, number: int, gradient: Array | Rows) -> bool:
        """See `Replica`."""
        elements = self.served.values(number, gradient) if isinstance(gradient, Rows) else gradient
        # The sum finds almost everything, and is faster than a look at each element; but a sum may overflow.
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.isfinite(elements.sum())) or bool(np.isfinite(elements).all())

    def put(self, number: int, gradient: Array | Rows, into: Array, add: bool) -> None:
        """See `Replica`."""
        there = self.served.tensor(number, into)
        with np.errstate(over="ignore", invalid="ignore"):  # on_nan="pass on"
            if isinstance(gradient, Rows):
                np.add.at(there, gradient.indices, self.served.values(number, gradient))
            elif add:
                there += gradient
            else:
                there[...] = gradient

    def is_there(self, number: int, gradient: Array, there: Array) -> bool:
        """See `Replica`."""
        return np.ascontiguousarray(gradient).tobytes() == there.tobytes()

    def read(self, number: int, into: Array) -> None:
        """See `Replica`."""
        self.served.tensor(number, into)[...] = self.served.read(number)

    def save(self, file: BinaryIO) -> None:
        """See `Replica`. The file is one for ``numpy.load``; variables of equal paths are there by their numbers too."""
        keys = [path if self._paths.count(path) == 1 else f"{path} {n}" for n, path in enumerate(self._paths)]
        arrays: dict[str, Any] = {
            key: self._kept[number] if number in self._kept else self.served.read(number)
            for number, key in enumerate(keys)
        }
        np.savez(file, **arrays)

    def take(self, number: int, value: Array) -> None:
        """See `Replica`."""
        tensor = self.served.tensor(number, value)
        self.keep(number, tensor)
        self.served.assign(number, tensor.copy())

    def keep(self, number: int, tensor: Array) -> None:
        """Keep a copy of a value that was pulled, for `save`: a graph gives values to the variables at a time of its own."""
        if self._keeps:
            self._kept[number] = tensor.copy()
