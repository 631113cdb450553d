"""`Messages`: tensors of any number and shape, in any nesting, from one rank to another.

The shapes travel when they change only. A send goes on while the program computes.
"""

from __future__ import annotations

import pickle
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdlite.communicator.communicator import Communicator
from hvdlite.protocols import Array, Request


class Messages:
    """Sends and receives nested tensors, on one rank.

    Args:
        communicator: The ranks. Nobody else sends on it.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sent: list[Request] = []
        self._told: dict[tuple[int, int], bytes] = {}
        """For each receiver and tag, the structure that was sent last."""
        self._heard: dict[tuple[int, int], bytes] = {}

    def send(self, tensors: Any, dest: int, tag: int) -> None:
        """Begin to send eager tensors, in any nesting of lists, tuples and dicts."""
        arrays = [np.ascontiguousarray(tensor.numpy()) for tensor in keras.tree.flatten(tensors)]
        numbers = iter(range(len(arrays)))
        structure = keras.tree.map_structure(lambda _: next(numbers), tensors)
        described = pickle.dumps((structure, [(each.shape, each.dtype.name) for each in arrays]))
        is_new = self._told.get((dest, tag)) != described
        self._isend(np.array([len(described) if is_new else 0], np.int64), dest, tag)
        if is_new:
            self._told[dest, tag] = described
            self._isend(np.frombuffer(described, np.uint8), dest, tag)
        for array in arrays:
            self._isend(array.reshape(-1).view(np.uint8), dest, tag)

    def _isend(self, array: Array, dest: int, tag: int) -> None:
        self._sent.append(self._communicator.isend(array, dest, tag))

    def receive(self, source: int, tag: int) -> Any:
        """Wait for what `source` has sent next, and return it."""
        length = np.empty(1, np.int64)
        self._recv(length, source, tag)
        if length[0]:
            described = np.empty(int(length[0]), np.uint8)
            self._recv(described, source, tag)
            self._heard[source, tag] = described.tobytes()
        structure, kinds = pickle.loads(self._heard[source, tag])
        tensors = []
        for shape, dtype in kinds:
            array = np.empty(shape, tf.as_dtype(dtype).as_numpy_dtype)
            self._recv(array.reshape(-1).view(np.uint8), source, tag)
            tensors.append(tf.convert_to_tensor(array))
        return keras.tree.map_structure(lambda number: tensors[number], structure)

    def _recv(self, array: Array, source: int, tag: int) -> None:
        self._communicator.irecv(array, source, tag).wait()

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for request in self._sent:
            request.wait()
        self._sent.clear()
