"""`Shards`: the pieces of a model's variables that one rank steps, as variables of their own.

An optimizer that is built for the pieces has the state of this rank's share only. Large pieces are cut to chunks that stay in
the cache while Keras' operations, which go through memory one after the other, step them: this halves the time of Adam.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.api import allgather_object
from hvdlite.gradients.layout import ALIGNMENT, Piece
from hvdlite.gradients.sharded_reducer import Place
from hvdlite.protocols import Array
from hvdlite_tf.gradients.copies import variable_like
from hvdlite_tf.gradients.sharded_exchange import ShardedExchange
from hvdlite_tf.variables import plain_variable, read

CHUNK = 2**18
"""The elements of a chunk for each thread that TensorFlow computes an operation with."""

MOST_CHUNKS = 512
"""The most chunks that large pieces are cut to: each adds some twenty operations to a graph."""


class Shards:
    """This rank's share of the variables that one optimizer trains.

    Args:
        options: The options of the exchange.
        identity: The identity of the optimizer.
        variables: All variables that are trained, of Keras or TensorFlow. They have values.
        whole: Never cut a variable in two. Variables with a constraint, which sees a variable as a whole, are not cut either.
        place: This rank's place.
        copies, stepped: See `ShardedExchange`.

    Attributes:
        variables: The argument.
        whole: Whether no variable is cut.
        exchange: The exchange of gradients and variables.
        pieces: What this rank steps.
        values: A variable for each piece, and a last one without elements: so each rank has something to step, makes the same
            calls, and counts the same steps.
    """

    def __init__(
        self,
        options: ExchangeOptions,
        identity: Identity,
        variables: Sequence[Any],
        whole: bool,
        place: Place,
        copies: bool,
        stepped: Callable[[], None],
    ) -> None:
        self.variables = list(variables)
        self.whole = whole or any(getattr(variable, "constraint", None) is not None for variable in variables)
        self.process_set = options.process_set
        self.exchange = ShardedExchange(options, identity, variables, self.whole, place, copies, stepped)
        owned = self.exchange.pieces
        self.pieces = owned if self.whole else [chunk for piece in owned for chunk in _chunks(piece, _length(owned))]
        nothing = Piece(0, 0, 0)
        with tf.init_scope():
            self.values = [self._variable_for(piece, self.whole) for piece in self.pieces]
            self.values.append(self._variable_for(nothing, False))
        self._numbers = {id(plain_variable(variable)): number for number, variable in enumerate(self.variables)}
        self._of_values = {
            id(plain_variable(value)): piece.tensor
            for value, piece in zip(self.values, [*self.pieces, nothing], strict=True)
        }

    def _variable_for(self, piece: Piece, whole: bool) -> Any:
        original = self.variables[piece.tensor]
        flat = np.asarray(read(plain_variable(original))).reshape(-1)[piece.start : piece.stop]
        made = variable_like(original, flat.reshape(tuple(original.shape)) if whole else flat)
        if not whole:
            made.constraint = None
        return made

    def numbers_of(self, variables: Sequence[Any]) -> list[int]:
        """Return the places of variables in `self.variables`.

        Raises:
            ValueError: The optimizer was not built with one of them. (Keras raises this, too.)
        """
        numbers = []
        for variable in variables:
            number = self._numbers.get(id(plain_variable(variable)))
            if number is None:
                raise ValueError(
                    f"Unknown variable: {variable}. This optimizer can only be called for the variables it was originally "
                    "built with: make another optimizer for other variables."
                )
            numbers.append(number)
        return numbers

    def original_of(self, value: Any) -> Any:
        """Return the variable that one of `self.values` is a piece of: TensorFlow's, if TensorFlow's is given."""
        original = self.variables[self._of_values[id(plain_variable(value))]]
        return original if isinstance(value, keras.Variable) else plain_variable(original)

    def read_anew(self, changed: Any) -> None:
        """Give the pieces the values of the variables.

        Args:
            changed: Whether that is necessary; a bool or a tensor.
        """

        def assign() -> None:
            for piece, value in zip(self.pieces, self.values, strict=False):
                flat = tf.reshape(read(plain_variable(self.variables[piece.tensor])), [-1])
                value.assign(tf.reshape(flat[piece.start : piece.stop], value.shape))

        if tf.is_tensor(changed):
            keras.ops.cond(changed, assign, lambda: None)
        elif changed:
            assign()

    def publish(self, after: Sequence[Any]) -> None:
        """Give the variables of all ranks the values of the pieces. Every rank calls this. See `ShardedExchange.publish`."""
        self.exchange.publish(self.pieces, [plain_variable(value) for value in self.values[:-1]], after)

    def together(self, values: Sequence[Any], what: str) -> list[Array]:
        """Return values for whole variables, from those of the pieces of all ranks. Every rank calls this, in eager code.

        Args:
            values: A variable for each piece of this rank, of its shape.
            what: What they are, for the messages that show a rank that waits.
        """
        own = [(piece, np.array(each).reshape(-1)) for piece, each in zip(self.pieces, values, strict=True)]
        found = [np.empty(tuple(variable.shape), _numpy_dtype(variable)) for variable in self.variables]
        for piece, flat in (
            each for rank in allgather_object(own, what, process_set=self.process_set) for each in rank
        ):
            found[piece.tensor].reshape(-1)[piece.start : piece.stop] = flat
        return found


def _numpy_dtype(variable: Any) -> Any:
    return plain_variable(variable).dtype.as_numpy_dtype


def _length(owned: Sequence[Piece]) -> int:
    """Return the number of elements of a chunk."""
    threads = tf.config.threading.get_intra_op_parallelism_threads() or len(os.sched_getaffinity(0))
    total = sum(piece.stop - piece.start for piece in owned)
    return max(CHUNK * threads, -(-total // (MOST_CHUNKS * ALIGNMENT)) * ALIGNMENT)


def _chunks(piece: Piece, length: int) -> list[Piece]:
    bounds = [*range(piece.start, piece.stop, length), piece.stop]
    return [Piece(piece.tensor, start, stop) for start, stop in itertools.pairwise(bounds)]
