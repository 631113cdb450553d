"""Variables of a strategy: they begin with equal values on all ranks, and what their `aggregation` says is done over the ranks.

=================  ===================================================================================
a variable         what happens to it
=================  ===================================================================================
ON_READ (metrics)  each rank counts its own rows; who reads it outside of `run` gets the sum (or mean)
with aggregation   what is assigned within `run` is reduced over the ranks before
any other          each rank has what it assigns
=================  ===================================================================================

In a step of Keras a rank may have no rows. Its metrics, which may be NaN then, do not count, and NaN is not assigned to its
moving statistics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite_tf.ops.allreduce import allreduce
from hvdlite_tf.ops.broadcast import broadcast
from hvdlite_tf.ops.ordered import as_written

_OWN = ("seed_generator_state", "hvdlite_")
"""Parts of the names of variables that may differ between ranks: the state of Keras' random generators, because otherwise all
ranks would have the same dropout; and the variables that hvdlite_tf makes for the process."""

_OVER_RANKS = {tf.VariableAggregation.SUM: hvdlite.Sum, tf.VariableAggregation.MEAN: hvdlite.Average}


def create_variable(create: Callable[..., tf.Variable], settings: dict[str, Any]) -> tf.Variable:
    """Make a variable with rank 0's initial value. Every rank calls this.

    Args:
        create: A function that makes this rank's variable.
        settings: The arguments for `create`, as `tf.variable_creator_scope` passes them.

    Raises:
        ArgumentError: The variable is made in a tf.function, with a value that is known only when the function runs.
    """
    name = settings.get("name") or ""
    own = any(each in name for each in _OWN)
    traced = not tf.executing_eagerly()
    if traced and not own:
        settings = settings | {"initial_value": _agreed_while_traced(settings.get("initial_value"), settings, name)}
    variable = create(**settings)
    if not (own or traced):
        hvdlite.broadcast(variable, 0, inplace=True)
    if own:
        return variable
    plain: Any = type(variable)
    if variable.aggregation != tf.VariableAggregation.NONE or not variable.trainable:
        plain = _assigned(plain)
    if _counts(variable):
        plain = _joined(plain)
    variable.__class__ = plain
    return variable


def _counts(variable: tf.Variable) -> bool:
    """Return whether each rank has a value of its own, and outside of `run` the variable has that of all ranks."""
    on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
    return bool(on_read and variable.aggregation != tf.VariableAggregation.NONE)


def _reduced(value: tf.Tensor, aggregation: tf.VariableAggregation) -> tf.Tensor:
    """Return what the ranks' values are together. Every rank calls this."""
    if aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
        return broadcast(value, 0)
    return allreduce(value, op=_OVER_RANKS[aggregation])


def _agreed_while_traced(given: Any, settings: dict[str, Any], name: str) -> tf.Tensor:
    """Return rank 0's initial value for a variable that all ranks make while they trace a tf.function."""
    with tf.init_scope():
        if not tf.executing_eagerly() or (tf.is_tensor(given) and not hasattr(given, "numpy")):
            raise ArgumentError(
                f"the variable {name} is made in a tf.function, of a value that is only known when it runs, so that ranks "
                "cannot agree on it: make it before, within strategy.scope()."
            )
        value = tf.convert_to_tensor(given() if callable(given) else given, settings.get("dtype"))
        agreed: tf.Tensor = hvdlite.broadcast(value, 0)
        return agreed


class _NotToBeReadByItself(NamedTuple):
    """An object in the place of a variable's handle, so that operations ask the variable for its value."""

    handle: tf.Tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)


@functools.cache
def _joined(plain: Any) -> type[Any]:
    """Return a subclass of a class of variables whose value, outside of `Strategy.run`, is reduced over all ranks.

    Metrics count in such variables: within `run` each rank counts its own batches, and ``metric.result()`` outside of it is
    about all ranks. The methods that saving uses (`numpy`, `read_value`) return the rank's own value, so that one rank can save
    alone.
    """

    def value(self: Any) -> tf.Tensor:
        own = plain.value(self)
        # Within `run` the caller wants this rank's own value.
        if not reads_for_all(self._distribute_strategy):
            return own
        return _reduced(own, self.aggregation)

    def handle(self: Any) -> tf.Tensor:
        return vars(self)["_handle"]

    def handle_to_read(self: Any) -> Any:
        # Eager operations read a resource variable's memory through this attribute if it is an eager tensor, and would not call
        # `value`.
        own = vars(self)["_handle"]
        return _NotToBeReadByItself(own) if reads_for_all(self._distribute_strategy) else own

    members = {"value": value, "handle": property(handle), "_handle": property(handle_to_read)}
    return type(plain.__name__, (plain,), {"__module__": plain.__module__, "__doc__": plain.__doc__, **members})


@functools.cache
def _assigned(plain: Any) -> type[Any]:
    """Return a subclass of a class of variables that reduces what is assigned to it within `Strategy.run`.

    A rank without rows keeps its value, where the new one would come from no rows.
    """

    def assign(self: Any, value: Any, *args: Any, **options: Any) -> Any:
        return plain.assign(self, _to_assign(self, value, lambda: plain.value(self)), *args, **options)

    def assign_add(self: Any, delta: Any, *args: Any, **options: Any) -> Any:
        return plain.assign_add(self, _to_assign(self, delta, lambda: tf.zeros_like(delta)), *args, **options)

    def assign_sub(self: Any, delta: Any, *args: Any, **options: Any) -> Any:
        return plain.assign_sub(self, _to_assign(self, delta, lambda: tf.zeros_like(delta)), *args, **options)

    def scatter(name: str) -> Callable[..., Any]:
        def refuse_in_run(self: Any, *args: Any, **options: Any) -> Any:
            if self.aggregation != tf.VariableAggregation.NONE and _is_assigned_by_a_step(self) and not _counts(self):
                raise ArgumentError(
                    f"{name}() of the variable {self.name} with aggregation={self.aggregation.name} within strategy.run: "
                    "the ranks cannot agree on its rows; use assign(), assign_add() or assign_sub()."
                )
            return getattr(plain, name)(self, *args, **options)

        return refuse_in_run

    scatters = {name: scatter(name) for name in dir(plain) if name.startswith(("scatter_", "batch_scatter_"))}
    members = {"assign": assign, "assign_add": assign_add, "assign_sub": assign_sub, **scatters}
    members = {name: as_written(member) for name, member in members.items()}
    return type(plain.__name__, (plain,), {"__module__": plain.__module__, "__doc__": plain.__doc__, **members})


def _is_assigned_by_a_step(variable: Any) -> bool:
    """Return whether a replica's own code assigns to the variable, rather than an optimizer, or code outside of `run`."""
    strategy = variable._distribute_strategy
    return not (reads_for_all(strategy) or strategy.extended.updates)


def _to_assign(variable: Any, value: Any, without_rows: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Return what this rank assigns to a variable.

    Args:
        variable: The variable.
        value: What the program assigns, or adds, or subtracts.
        without_rows: Returns what takes its place on a rank without rows.
    """
    value = tf.convert_to_tensor(value, variable.dtype)
    extended = variable._distribute_strategy.extended
    if reads_for_all(variable._distribute_strategy):
        # The value of all ranks together, so one of them has it.
        is_sum = _counts(variable) and variable.aggregation == tf.VariableAggregation.SUM
        return value if not is_sum or extended.rank == 0 else tf.zeros_like(value)
    if not _is_assigned_by_a_step(variable):
        return value
    if variable.aggregation != tf.VariableAggregation.NONE and not _counts(variable):
        return _reduced(value, variable.aggregation)
    share = tf.distribute.get_replica_context().share
    if share is None or extended.is_exact(variable):
        return value
    if _counts(variable):
        return tf.where(share.rows > 0, value, without_rows())
    if not value.dtype.is_floating:
        return value
    return tf.where(tf.logical_or(share.rows > 0, tf.math.is_finite(value)), value, without_rows())


def reads_for_all(strategy: tf.distribute.Strategy) -> bool:
    """Return whether the running code is outside of `run` of this strategy, where values are those of all ranks."""
    context = tf.distribute.get_replica_context()
    return context is None or context.strategy is not strategy
