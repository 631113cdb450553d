"""`ShardedExchange`: the exchange of a sharded optimizer, in TensorFlow's eager code and in a tf.function.

A step makes two calls of Python, and between them Keras steps this rank's pieces of the variables::

    gradients ─▶ call: `ShardedSync.exchange` ─▶ of this rank's pieces ─▶ Keras' step ─▶ call: `publish` ─▶ variables

TensorFlow holds what the calls return without a copy: a variable takes the memory of what it is assigned, and gets other memory
as soon as anybody changes it. So the memory shows whether the program has changed a variable since the last step, and only then
this rank's pieces are read from the variables anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from hvdlite.adapter.identity import Identity
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.adapter.sharded import ShardedSync
from hvdlite.errors import ArgumentError, HvdliteError, UnsupportedTensorError
from hvdlite.gradients.layout import Piece
from hvdlite.gradients.sharded_reducer import Place
from hvdlite.protocols import Array
from hvdlite_tf.gradients.encoded import DENSE, NONE, Wire, as_dense
from hvdlite_tf.gradients.exchange import Agreed, check_gradient, function_name, unexpected
from hvdlite_tf.ops.ordered import is_built_for_a_session, ordered
from hvdlite_tf.variables import plain_variable, read

T = TypeVar("T")


class ShardGradients(NamedTuple):
    """What one step of a sharded optimizer begins with.

    Attributes:
        changed: Whether the program has changed variables since the last step; a bool or a tensor.
        gradients: For each piece of this rank, the combined gradient, flat; None if no rank has a gradient of the variable.
        there: For each variable, whether some rank has a gradient.
    """

    changed: Any
    gradients: list[Any]
    there: list[bool]


class ShardedExchange:
    """Gives this rank its shard of the gradients, and all ranks the variables that each rank has stepped its shard of.

    Args:
        options: The options of the exchange, the same on all ranks.
        identity: The identity of the optimizer.
        variables: All variables that are trained, of Keras or TensorFlow.
        whole: Never cut a variable between ranks.
        place: This rank's place.
        copies: Whether the optimizer may keep gradients after its step, so that they must not lie in memory that is used again.
        stepped: Called in each step, after the exchange.

    Attributes:
        sync: The exchange of arrays.
        pieces: What this rank owns.

    Raises:
        UnsupportedTensorError: A variable does not hold floating-point numbers.
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
        self._options, self._copies, self._stepped = options, copies, stepped
        self._variables = [plain_variable(variable) for variable in variables]
        wires = [Wire(variable, None, options.codec) for variable in self._variables]
        self._infos = [wire.info for wire in wires]
        self.pieces = place.pieces(self._infos, whole)
        self.sync = ShardedSync(self._infos, options.op, options.process_set, identity, whole, place)

    def combine(self, gradients: Sequence[Any], weight: Any, pieces: Sequence[Piece]) -> ShardGradients:
        """Return this rank's shard of the gradients of all ranks. Every rank calls this.

        Args:
            gradients: A dense tensor, a tf.IndexedSlices or None for each variable.
            weight: The number of samples that this rank's gradients are the mean of; 1 if None.
            pieces: `self.pieces`, cut further as the caller likes.

        Raises:
            ArgumentError: XLA compiles this function; or it is a graph for a session; or a gradient has another dtype or shape
                than its variable.
            UnsupportedTensorError: A gradient is sparse.
            MismatchError, HvdliteError: See `hvdlite_tf.gradients.exchange.GradientExchange.combine`.
        """
        given = [self._dense(gradient, variable) for gradient, variable in zip(gradients, self._variables, strict=True)]
        weight = 1.0 if weight is None else weight
        if tf.executing_eagerly():
            found = self._exchange(
                [None if gradient is None else np.asarray(gradient) for gradient in given],
                float(weight),
                [np.asarray(read(variable)) for variable in self._variables],
                pieces,
            )
            tensors = [None if g is None else tf.convert_to_tensor(g) for g in found.gradients]
            return ShardGradients(found.changed, tensors, found.there)
        return self._combine_in_graph(given, weight, pieces)

    def _dense(self, gradient: Any, variable: Any) -> Any:
        check_gradient(variable, gradient)
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self._options.sparse_as_dense:
            raise UnsupportedTensorError(
                f"{variable.name} of shape {tuple(variable.shape)} has sparse gradients (tf.IndexedSlices, as embeddings "
                "have), which cannot be sharded: pass sparse_as_dense=True, or leave out shard=True."
            )
        return as_dense(gradient, variable)

    def _combine_in_graph(self, given: Sequence[Any], weight: Any, pieces: Sequence[Piece]) -> ShardGradients:
        if is_built_for_a_session():
            raise ArgumentError(
                "shard=True: this is a graph for a session of TensorFlow 1, and a sharded optimizer works in eager code and in "
                "tf.functions: leave out shard=True."
            )
        kinds = "".join(NONE if gradient is None else DENSE for gradient in given)
        key = tuple(self._infos), self._options.op, "sharded", function_name()
        agreed = Agreed(weakref.proxy(self.sync), key, kinds)
        expected = agreed.union() or kinds
        if set(expected) == {NONE}:  # Keras raises an error, on all ranks
            return ShardGradients(False, [None] * len(pieces), [False] * len(kinds))
        names = [variable.name for variable in self._variables]
        there = [place for place, gradient in enumerate(given) if gradient is not None]
        dtypes = [variable.dtype for variable in self._variables]
        stepped = [piece for piece in pieces if expected[piece.tensor] != NONE]
        held = weakref.WeakMethod(self._exchange)  # and `run` must not hold a reference to the graph

        def run(weight: Array, *arrays: Array) -> list[Array]:
            exchange = _still_there(held)
            agreed.check(expected)
            own: list[Array | None] = [None] * len(names)
            for place, array in zip(there, arrays, strict=False):
                own[place] = array
            found = exchange(own, float(weight), arrays[len(there) :], pieces)
            results = [np.asarray(found.changed)]
            for piece, gradient in zip(pieces, found.gradients, strict=True):
                if (gradient is None) != (expected[piece.tensor] == NONE):
                    raise HvdliteError(unexpected(names[piece.tensor], gradient is None))
                results += [] if gradient is None else [gradient]
            return results

        inputs = [tf.cast(weight, tf.float64), *(given[place] for place in there), *map(read, self._variables)]
        specs = [tf.TensorSpec((piece.stop - piece.start,), dtypes[piece.tensor]) for piece in stepped]
        changed, *results = ordered(run, inputs, [tf.TensorSpec((), tf.bool), *specs])
        combined = dict(zip(stepped, results, strict=True))
        return ShardGradients(changed, [combined.get(piece) for piece in pieces], [kind != NONE for kind in expected])

    def _exchange(
        self, own: Sequence[Array | None], weight: float, variables: Sequence[Array], pieces: Sequence[Piece]
    ) -> ShardGradients:
        changed = self.sync.have_changed(variables)
        found = self.sync.exchange(own, weight, lambda: list(variables))
        self._stepped()
        gradients = []
        for piece in pieces:
            whole = found[piece.tensor]
            gradient = None if whole is None else whole[piece.start : piece.stop]
            gradients.append(gradient.copy() if self._copies and gradient is not None else gradient)
        return ShardGradients(changed, gradients, [each is not None for each in found])

    def publish(self, pieces: Sequence[Piece], values: Sequence[Any], after: Sequence[Any]) -> None:
        """Give the variables of all ranks the values of all pieces. Every rank calls this after `combine`.

        Args:
            pieces: The pieces that were given to `combine`.
            values: The new value of each piece: a tensor, or a variable of TensorFlow.
            after: Tensors of all that reads the gradients that `combine` has returned, whose memory is used again. Ignored in
                eager code, which has read them.
        """
        publish: Callable[..., list[Array]] = self.sync.publish
        if tf.executing_eagerly():
            found = [
                tf.convert_to_tensor(each) for each in publish(pieces, [np.asarray(read(each)) for each in values])
            ]
        else:
            with tf.control_dependencies(list(after)):
                inputs = [tf.identity(read(value)) for value in values]
            specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in self._variables]
            held = weakref.WeakMethod(publish)
            found = ordered(lambda *arrays: _still_there(held)(pieces, arrays), inputs, specs)
        for variable, value in zip(self._variables, found, strict=True):
            variable.assign(value)


def _still_there(held: weakref.WeakMethod[Callable[..., T]]) -> Callable[..., T]:
    """Return the method of an object that the optimizer holds.

    A graph does not hold it, for Keras keeps the graphs of each `compile`: they would keep the shared memory, too.

    Raises:
        HvdliteError: The optimizer is gone.
    """
    found = held()
    if found is None:
        raise HvdliteError(
            "the sharded optimizer of this tf.function is gone, for compile() has replaced it: make the function anew."
        )
    return found
