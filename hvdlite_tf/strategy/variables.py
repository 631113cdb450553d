"""Variables of a strategy: they begin with equal values on all ranks, and those that count are reduced over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite_tf.ops.allreduce import allreduce

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
    on_read = settings.get("synchronization") == tf.VariableSynchronization.ON_READ
    if on_read and settings.get("aggregation") in _OVER_RANKS:
        plain: Any = type(variable)
        variable.__class__ = _joined(plain)
    return variable


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
        return allreduce(own, op=_OVER_RANKS[self.aggregation])

    def handle(self: Any) -> tf.Tensor:
        return vars(self)["_handle"]

    def handle_to_read(self: Any) -> Any:
        # Eager operations read a resource variable's memory through this attribute if it is an eager tensor, and would not call
        # `value`.
        own = vars(self)["_handle"]
        return _NotToBeReadByItself(own) if reads_for_all(self._distribute_strategy) else own

    members = {"value": value, "handle": property(handle), "_handle": property(handle_to_read)}
    return type(plain.__name__, (plain,), {"__module__": plain.__module__, "__doc__": plain.__doc__, **members})


def reads_for_all(strategy: tf.distribute.Strategy) -> bool:
    """Return whether the running code is outside of `run` of this strategy, where values are those of all ranks."""
    context = tf.distribute.get_replica_context()
    return context is None or context.strategy is not strategy
