"""Variables of a strategy: the same on every rank at first, and sums over the ranks where they count something."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite_tf.ops.allreduce import allreduce

_OWN = ("seed_generator_state", "hvdlite_")
"""In the names of variables that each rank has for itself: the state of Keras' random numbers, since with one for all the
ranks' dropout would leave out the same places; and what hvdlite_tf makes for the process."""

_OVER_RANKS = {tf.VariableAggregation.SUM: hvdlite.Sum, tf.VariableAggregation.MEAN: hvdlite.Average}


def create_variable(create: Callable[..., tf.Variable], settings: dict[str, Any]) -> tf.Variable:
    """Make a variable with rank 0's value. Every rank calls this.

    Args:
        create: Makes this rank's.
        settings: Arguments for it, as `tf.variable_creator_scope` passes them.

    Raises:
        ArgumentError: In a tf.function, with a value that is known only when it runs.
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
    """Rank 0's initial value of a variable that is made while a tf.function is first traced, on all ranks at once."""
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
    """In the place of a variable's handle, so that an operation that is given the variable asks it for its value."""

    handle: tf.Tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)


@functools.cache
def _joined(plain: Any) -> type[Any]:
    """Of a class of variables, the one whose value outside of `Strategy.run` is that of all ranks.

    Metrics count in such variables: each rank its own batches within `run`; ``metric.result()`` outside of it is of all ranks.
    Ways of looking at a variable that saving uses (`numpy`, `read_value`) give the rank's own, so that one rank can save alone.
    """

    def value(self: Any) -> tf.Tensor:
        own = plain.value(self)
        # In a replica context of ours this is None or another one's: then it is this rank's own value that is wanted.
        if not reads_for_all(self._distribute_strategy):
            return own
        return allreduce(own, op=_OVER_RANKS[self.aggregation])

    def handle(self: Any) -> tf.Tensor:
        return vars(self)["_handle"]

    def handle_to_read(self: Any) -> Any:
        # Eager operations take a resource variable's memory by this attribute, if it is an eager tensor, and do not ask it.
        own = vars(self)["_handle"]
        return _NotToBeReadByItself(own) if reads_for_all(self._distribute_strategy) else own

    members = {"value": value, "handle": property(handle), "_handle": property(handle_to_read)}
    return type(plain.__name__, (plain,), {"__module__": plain.__module__, "__doc__": plain.__doc__, **members})


def reads_for_all(strategy: tf.distribute.Strategy) -> bool:
    """Whether the code that runs is for all ranks together: not within `run` of this strategy."""
    context = tf.distribute.get_replica_context()
    return context is None or context.strategy is not strategy
