"""``shard=True`` for the optimizers of Keras 3: each rank has the state, and makes the step, of its share of the parameters.

The optimizer is built for this rank's pieces of the variables (`hvdlite_tf.optimizers.shards`) instead of the variables, so all
that Keras does in a step, it does to the pieces::

    gradients ─▶ mean of this rank's pieces ─▶ clipping, weight decay, update, moving averages ─▶ variables of all ranks

What needs more than the pieces is asked of all ranks: norms, and whether scaled gradients are finite. This is the idea of ZeRO
(Rajbhandari et al., arXiv:1910.02054), stage 1; also with ``gradient_accumulation_steps``, where only the share of the sum is
kept, each pass exchanges its gradients.

What a program saves is the state of all ranks together: see `whole_state`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdlite.adapter.agreement import all_together
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.api import allgather_object, broadcast_object, world
from hvdlite.errors import ArgumentError, UnsupportedTensorError, ranks_text
from hvdlite.protocols import Array, TensorInfo
from hvdlite_tf.gradients.optimizer_parts import innermost
from hvdlite_tf.optimizers import backends
from hvdlite_tf.optimizers.keras import DistributedKerasOptimizer, DistributedState, accumulate, check, wrap
from hvdlite_tf.optimizers.plain_class import named_like
from hvdlite_tf.optimizers.shard_state import assign_state, replicated_in, whole_copy
from hvdlite_tf.optimizers.shardable import check_shardable
from hvdlite_tf.optimizers.shards import Shards
from hvdlite_tf.variables import plain_variable, read, times


def distribute_sharded(
    optimizer: Any,
    options: ExchangeOptions,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer of Keras 3 step this rank's share of the parameters. It is changed and returned.

    The arguments are those of `hvdlite_tf.optimizers.keras.distribute_keras`. Every rank calls this.

    Raises:
        ArgumentError: The optimizer cannot be sharded, or other arguments do not fit.
        MismatchError: The ranks have optimizers of different classes, or not all of them are sharded. Raised on all ranks.
    """
    inner = check(optimizer)
    whole = check_shardable(inner, options)
    if backward_passes_per_step != 1:
        accumulate(inner, backward_passes_per_step)
    state = ShardedState(
        options,
        backward_passes_per_step,
        average_aggregated_gradients,
        scale_local_gradients,
        whole,
        type(inner).__name__,
    )
    wrap(optimizer, state)
    return optimizer


class ShardedState(DistributedState):
    """The state that a sharded optimizer has and a plain one does not.

    Attributes:
        shards: This rank's share of the variables; None until the optimizer is built.
        stepping: The numbers of the variables whose pieces are being stepped, one for each gradient.
        saved: A plain optimizer with the state of all ranks, while the program may save it; else None.
        loaded: A plain optimizer with the state that this rank has loaded since the last step; else None.
        last: In a graph, the piece that was stepped last, which the next one waits for.
    """

    def __init__(
        self, options: ExchangeOptions, passes: int, average_passes: bool, scale_local: bool, whole: bool, name: str
    ) -> None:
        super().__init__(options, passes, average_passes, scale_local)
        everybody = all_together("shard=True", options.process_set)
        everybody.check_same([f"{name}, shard=True"], "what DistributedOptimizer is given")
        self._place = world("DistributedOptimizer").group(options.process_set).reducers.place()
        self._whole = whole
        self.shards: Shards | None = None
        self.stepping: list[int] = []
        self.saved: Any = None
        self.loaded: Any = None
        self.averages: list[Any] = []
        self.may_read_averages = False
        self._start, self._loads = "empty at first", 0
        self.last: Any = None

    @property
    def methods(self) -> type:
        return ShardedKerasOptimizer

    def enter(self, optimizer: Any) -> None:
        inner = innermost(optimizer)
        if inner is not optimizer:
            inner.__class__ = named_like(inner.__class__, Stepping)
            object.__setattr__(inner, "_hvdlite_sharded", self)
        object.__setattr__(optimizer, "_hvdlite_sharded", self)

    @property
    def dealt(self) -> Shards:
        """This rank's share of the variables, after the optimizer is built."""
        assert self.shards is not None
        return self.shards

    def deal(self, variables: Sequence[Any], copies: bool) -> list[Any]:
        """Take this rank's share of these variables, and return the variables that the optimizer steps."""
        assert self.identity is not None
        self.shards = Shards(self.options, self.identity, variables, self._whole, self._place, copies, self._stepped)
        self._know_origin()
        return self.shards.values

    def _stepped(self) -> None:
        self.loaded = None  # the headers have shown that all ranks have loaded equally often

    def has_loaded(self, copied: Any) -> None:
        """Note that this rank has loaded the state of a plain optimizer."""
        self.loaded, self._loads = copied, self._loads + 1
        self._know_origin()

    def have_same_state(self) -> None:
        """Note that all ranks have been given the same state."""
        self.loaded, self._start, self._loads = None, "that of all ranks", 0
        self._know_origin()

    def _know_origin(self) -> None:
        self.dealt.exchange.sync.origin = f"{self._start}, loaded {self._loads} times since"

    def sums(self, own: Sequence[Any]) -> Any:
        """Return sums of scalars over all ranks, as float64 of shape ``(n,)``. Every rank calls this."""
        sync = self.dealt.exchange.sync
        given = tf.stack([tf.cast(each, tf.float64) for each in own])

        def add(values: Array) -> list[Array]:
            return [sync.sum_over_ranks(np.array(values))]

        return backends.current().call(add, [given], [TensorInfo("float64", (len(own),))])[0]


class Stepping(keras.optimizers.Optimizer):  # type: ignore[misc]  # mypy does not see Keras
    """The methods of the optimizer that steps the pieces: the sharded one, or the one inside a LossScaleOptimizer."""

    _hvdlite_sharded: ShardedState

    def _clip_gradients(self, grads: list[Any]) -> Any:
        """Clip as Keras does, by the norms of whole variables."""
        state = self._hvdlite_sharded
        if self.clipnorm and self.clipnorm > 0 and not state.dealt.whole:
            count = len(state.dealt.variables)
            own: list[Any] = [tf.zeros((), tf.float64)] * count
            for number, gradient in zip(state.stepping, grads, strict=True):
                own[number] += _squares(gradient)
            norms = tf.sqrt(state.sums(own))
            factors = self.clipnorm / tf.maximum(norms, self.clipnorm)
            return [g * tf.cast(factors[n], g.dtype) for n, g in zip(state.stepping, grads, strict=True)]
        if not self.clipnorm and self.global_clipnorm and self.global_clipnorm > 0:
            norm = tf.sqrt(state.sums([sum(map(_squares, grads))])[0])
            factor = self.global_clipnorm * tf.minimum(1.0 / norm, 1.0 / self.global_clipnorm)
            factor += norm - norm  # NaN if the norm is not finite, as in Keras
            return [gradient * tf.cast(factor, gradient.dtype) for gradient in grads]
        return keras.optimizers.Optimizer._clip_gradients(self, grads)  # each element, or each variable by itself

    def _use_weight_decay(self, variable: Any) -> Any:
        return super()._use_weight_decay(self._hvdlite_sharded.dealt.original_of(variable))

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Step one piece as Keras does; in a graph after the piece before, so that a piece stays in the cache meanwhile."""
        if tf.executing_eagerly():
            super().update_step(gradient, variable, learning_rate)
            return
        state, graph = self._hvdlite_sharded, tf.compat.v1.get_default_graph()
        before = [state.last] if state.last is not None and state.last.graph is graph else []
        with tf.control_dependencies(before):
            gradient = tf.identity(gradient)
        super().update_step(gradient, variable, learning_rate)
        state.last = read(plain_variable(variable))

    # Keras' callback SwapEMAWeights pairs these averages with the variables of the model, by their places.

    @property
    def _model_variables_moving_average(self) -> list[Any]:
        state = self._hvdlite_sharded
        if not state.may_read_averages:
            raise ArgumentError(
                "use_ema with shard=True: each rank has the moving averages of its share only, so the callback SwapEMAWeights "
                "cannot exchange them with the weights. Leave it out (fit() gives the model the averages in the end), or call "
                "optimizer.finalize_variable_values(model.trainable_variables) on all ranks; or leave out shard=True."
            )
        return state.averages

    @_model_variables_moving_average.setter
    def _model_variables_moving_average(self, averages: list[Any]) -> None:
        self._hvdlite_sharded.averages = averages

    # What is saved

    def set_weights(self, weights: Any) -> None:
        """Raise ArgumentError: the variables are this rank's share."""
        raise ArgumentError(
            "set_weights() of an optimizer with shard=True: each rank has a share of its state. Load it from a file, by "
            "model.load_weights(file) or hvd.checkpoint.load(…), which cut this rank's share from the whole."
        )

    def save_own_variables(self, store: Any) -> None:
        """Write the state of all ranks together, as a plain optimizer writes it. See `ShardedKerasOptimizer.whole_state`.

        Raises:
            ArgumentError: The program is not in the body of ``with optimizer.whole_state():``.
        """
        state = self._hvdlite_sharded
        if not self.built:
            super().save_own_variables(store)
            return
        if state.saved is None:
            raise ArgumentError(
                "this optimizer has shard=True, so each rank has a share of its state, and saving needs all ranks. Let every "
                "rank run `with optimizer.whole_state():`, and save in its body, on one rank: model.save(file). Or use "
                "hvd.checkpoint.save(…), or hvd.callbacks.BestModelCheckpoint with save_freq='epoch'."
            )
        copied = state.saved if isinstance(self, ShardedKerasOptimizer) else innermost(state.saved)
        copied.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Take this rank's share of a state that a plain optimizer, or a sharded one on any number of ranks, has written.

        Every rank does this; or one does, before `fit` with BroadcastGlobalVariablesCallback.
        """
        if not self.built:
            super().load_own_variables(store)
        elif isinstance(self, ShardedKerasOptimizer):
            copied = self.hvdlite_plain()
            copied.load_own_variables(store)
            if len(store.keys()) == len(copied.variables):  # if not, Keras has warned
                self.hvdlite_load(copied)
        # The one inside a LossScaleOptimizer has been given its part by that.


class ShardedKerasOptimizer(Stepping, DistributedKerasOptimizer):
    """The methods that `distribute_sharded` adds to an optimizer's class."""

    _hvdlite: ShardedState
    built: bool

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """Return a context manager: in its body this optimizer, and its model, can be saved. Every rank calls this.

        The state of all ranks is gathered in the memory of each rank. What is saved in the body, on any rank, is what a plain
        optimizer saves, and can be loaded by one, and by a sharded one on any number of ranks::

            with optimizer.whole_state():
                if hvd.rank() == 0:
                    model.save("model.keras")

        Raises:
            ArgumentError: The optimizer cannot be made again from its configuration; or the code is in a tf.function.
        """
        state = self._hvdlite
        state.saved = self.hvdlite_whole() if self.built else None
        try:
            yield
        finally:
            state.saved = None

    def hvdlite_whole(self) -> Any:
        """Return a plain optimizer with the state of all ranks. Every rank calls this."""
        _need_eager("the state of a sharded optimizer is gathered")
        return whole_copy(self, self._hvdlite.dealt, gather=True)

    def hvdlite_load(self, copied: Any) -> None:
        """Take this rank's share of the state of a plain optimizer that is built for the whole variables."""
        assign_state(self, self._hvdlite.dealt, copied)
        self._hvdlite.has_loaded(copied)

    def hvdlite_plain(self) -> Any:
        """Return a plain optimizer that is built for the whole variables, to be given a state for `hvdlite_load`."""
        return whole_copy(self, self._hvdlite.dealt)

    def hvdlite_share(self, root: int) -> None:
        """Give all ranks the state that a rank has loaded since the last step. Every rank calls this.

        Args:
            root: The rank, by its number in the process set.

        Raises:
            ArgumentError: That rank has loaded none, and another one has. Raised on all ranks.
        """
        state = self._hvdlite
        if state.shards is None:
            return
        told = allgather_object(state.loaded is not None, process_set=state.options.process_set)
        if any(told) and not told[root]:
            ranks = world("fit()").ranks(state.options.process_set)
            others = [rank for rank, has in zip(ranks, told, strict=True) if has]
            raise ArgumentError(
                f"{ranks_text(others)} has loaded a state of this sharded optimizer, and rank {ranks[root]}, whose state all "
                "ranks shall get, has not: load it there, or on all ranks."
            )
        if any(told):
            loaded = state.loaded
            own = None if loaded is None else [keras.ops.convert_to_numpy(each) for each in loaded.variables]
            values: Any = broadcast_object(own, root, process_set=state.options.process_set)
            copied = self.hvdlite_plain()
            for variable, value in zip(copied.variables, values, strict=True):
                variable.assign(value)
            assign_state(self, state.shards, copied)
        state.have_same_state()

    def hvdlite_replicated(self) -> list[Any]:
        """Return the variables of this optimizer that all ranks have: learning rates, counts, scales of losses."""
        return self.variables if self._hvdlite.shards is None else replicated_in(self)

    def hvdlite_trained(self) -> list[Any]:
        """Return the variables of the model that all ranks together step."""
        return self._hvdlite.dealt.variables

    def hvdlite_variables(self) -> list[Any]:
        """Return the backend's variables that are equal on all ranks."""
        trained = [] if self._hvdlite.shards is None else self.hvdlite_trained()
        return [plain_variable(each) for each in [*trained, *self.hvdlite_replicated()]]

    def register_local_var(self, var: Any) -> None:
        """Raise ArgumentError: a sharded optimizer has no local variables."""
        raise ArgumentError(
            "register_local_var() with shard=True: a local variable has other values on each rank, and a sharded optimizer "
            "gives all ranks the values of one. Leave out shard=True."
        )

    def build(self, variables: Any) -> None:
        """Make the optimizer's variables, for this rank's share of the given ones."""
        if not self.built:
            kind = innermost(self).__class__
            pieces = self._hvdlite.deal(variables, copies=kind.__module__.partition(".")[0] != "keras")
            with self._reading_averages():  # TensorFlow looks at each attribute before it is set
                super().build(pieces)

    def check_finite(self, grads: Any) -> Any:
        """Return whether the gradients of all ranks are finite: a LossScaleOptimizer asks this."""
        own = super().check_finite(grads)
        return tf.equal(self._hvdlite.sums([tf.logical_not(own)])[0], 0.0)

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Combine the gradients, step this rank's share, and give all ranks the result. The arguments are those of Keras."""
        gradients = list(grads)
        given = None if trainable_variables is None else list(trainable_variables)
        if gradients and given is not None and not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(given)
                self.built = True
        if not gradients or not self.built:
            super(DistributedKerasOptimizer, self).apply(gradients, given)  # which does nothing, or raises
            return
        state, shards = self._hvdlite, self._hvdlite.dealt
        given = shards.variables if given is None else given
        own = self._by_number(gradients, given)
        received = shards.exchange.combine(own, state.weight, shards.pieces)
        if not any(received.there):
            super(DistributedKerasOptimizer, self).apply([None], shards.values[-1:])  # Keras raises its own error
        missing = [place for place in shards.numbers_of(given) if not received.there[place]]
        if missing:  # as Keras does
            names = [getattr(shards.variables[place], "path", shards.variables[place].name) for place in missing]
            warnings.warn(f"Gradients do not exist for variables {names} on any rank.", stacklevel=2)
        shards.read_anew(received.changed)
        found = zip(shards.pieces, shards.values, received.gradients, strict=False)
        stepped = [each for each in found if each[2] is not None]
        pieces = [tf.reshape(gradient, value.shape) for _, value, gradient in stepped]
        if state.factor != 1:
            pieces = [times(gradient, state.factor) for gradient in pieces]
        values = [value for _, value, _ in stepped]
        state.stepping = [piece.tensor for piece, _, _ in stepped]
        if not stepped:  # so that this rank counts the step, and makes the same calls
            nothing = shards.values[-1]
            pieces, values, state.stepping = [tf.zeros((0,), nothing.dtype)], [nothing], [0]
        with self._reading_averages():
            super(DistributedKerasOptimizer, self).apply(pieces, values)
        self._publish()

    def _by_number(self, gradients: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """Return the gradient of each variable."""
        shards = self._hvdlite.dealt
        if len(gradients) != len(given):
            raise ArgumentError(
                f"apply() with {len(gradients)} gradients for {len(given)} variables: expected one for each."
            )
        own: list[Any] = [None] * len(shards.variables)
        for number, gradient in zip(shards.numbers_of(given), gradients, strict=True):
            if getattr(shards.variables[number], "overwrite_with_gradient", False):
                raise UnsupportedTensorError(
                    f"{shards.variables[number].path} (float8 training) has scales in place of gradients."
                )
            own[number] = gradient
        return own

    def _publish(self) -> None:
        """Give the variables of all ranks the values of the pieces, if this step has changed them."""
        shards, inner = self._hvdlite.dealt, innermost(self)
        after = [] if tf.executing_eagerly() else [read(plain_variable(variable)) for variable in self.variables]
        passes = inner.gradient_accumulation_steps
        if passes and not (inner.use_ema and inner.ema_overwrite_frequency):
            due = keras.ops.equal(inner._iterations % passes, 0)
            keras.ops.cond(due, lambda: shards.publish(after), lambda: None)
        else:
            shards.publish(after)

    @contextlib.contextmanager
    def _reading_averages(self) -> Iterator[None]:
        """Return a context manager for what Keras does to the pieces."""
        state = self._hvdlite
        state.may_read_averages = True
        try:
            yield
        finally:
            state.may_read_averages, state.last = False, None

    def finalize_variable_values(self, var_list: Any) -> None:
        """Give the model the moving averages, with ``use_ema``. Every rank calls this, as `fit` does in the end."""
        if not innermost(self).use_ema or not self.built:
            return
        _need_eager("moving averages are gathered")
        shards = self._hvdlite.dealt
        whole = shards.together(self._hvdlite.averages[:-1], "moving averages of a sharded optimizer")
        for number, variable in zip(shards.numbers_of(var_list), var_list, strict=True):
            variable.assign(whole[number])


def _squares(gradient: Any) -> Any:
    wide = tf.cast(gradient, tf.float32) if gradient.dtype in (tf.float16, tf.bfloat16) else gradient
    return tf.cast(tf.reduce_sum(tf.square(wide)), tf.float64)


def _need_eager(what: str) -> None:
    if not tf.executing_eagerly():
        raise ArgumentError(f"{what} from all ranks outside of tf.functions: call this in eager code.")
