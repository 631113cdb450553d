"""The same start on every rank: the variables of one rank for all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet
from hvdlite.errors import ArgumentError
from hvdlite_tf.tensor import plain_variable


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0, *, process_set: ProcessSet | None = None) -> None:
    """Overwrite the variables of every rank with the root's, in place.

    Args:
        variables: Those of TensorFlow or Keras, such as ``model.weights``, in the same order on every rank. (Not
            ``model.variables``: the states of random number generators are among them, and would make dropout equal.)
        root_rank: Whose values everybody gets; its number within `process_set`.
        process_set: The ranks that take part; all by default.

    Raises:
        ArgumentError: Called inside of a tf.function.
        UnsupportedTensorError: One of them is no variable.
        MismatchError: The ranks have different variables.
    """
    if tf.inside_function():
        raise ArgumentError("broadcast_variables() works on values: call it outside of tf.function.")
    plain = [plain_variable(variable) for variable in variables]
    hvdlite.broadcast(plain, root_rank, inplace=True, process_set=process_set)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]  # mypy does not see Keras
    """Gives every rank the root's model weights and optimizer state when `fit` begins. On every rank.

    The model must be built by then: after the first batch is too late, since that updates each rank's own weights.

    Args:
        root_rank: Whose values everybody gets; its number within `process_set`.
        process_set: The ranks that take part; all by default.
    """

    def __init__(self, root_rank: int = 0, *, process_set: ProcessSet | None = None) -> None:
        super().__init__()
        self._root_rank = root_rank
        self._process_set = process_set

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast.

        Raises:
            ArgumentError: The model is not built on some rank. Raised on all of them.
        """
        model = self.model
        built = hvdlite.allgather_object(bool(model.built), process_set=self._process_set)
        if not all(built):
            ranks = [rank for rank, there in enumerate(built) if not there]
            raise ArgumentError(
                f"the model has no weights yet on ranks {ranks}, so there is nothing to broadcast: begin it with "
                "keras.layers.Input, or call model.build(input_shape), on every rank, before fit()."
            )
        if not model.optimizer.built:  # it may be on the root, which has loaded a checkpoint
            model.optimizer.build(model.trainable_variables)
        broadcast_variables(
            [*model.weights, *model.optimizer.variables], self._root_rank, process_set=self._process_set
        )
