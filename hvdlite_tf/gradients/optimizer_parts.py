"""What Keras 3, tf_keras and its legacy optimizers call differently."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import Any

from hvdlite.adapter.identity import Identity
from hvdlite.errors import ArgumentError
from hvdlite_tf.variables import plain_variable, read


def innermost(optimizer: Any) -> Any:
    """The optimizer inside of a LossScaleOptimizer; any other as it is."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def optimizers_in(model: Any) -> list[Any]:
    """The optimizers of a model: what it was compiled with, and what else it keeps as attributes, as a GAN keeps two."""
    found: list[Any] = []
    for each in (getattr(model, "optimizer", None), *vars(model).values()):
        if hasattr(each, "apply_gradients") and hasattr(each, "iterations") and all(each is not one for one in found):
            found.append(each)
    return found


def options_of(optimizer: Any) -> Any:
    """How an optimizer (or one inside of it) exchanges gradients; None if it does not."""
    state = _distributed_state_of(optimizer)
    return None if state is None else state.exchange.options


def identities_in(model: Any) -> list[Identity]:
    """Of the model's distributed optimizers."""
    states = map(_distributed_state_of, optimizers_in(model))
    return [state.identity for state in states if state is not None]


def _distributed_state_of(optimizer: Any) -> Any:
    """What makes an optimizer, or one inside of it, a distributed one; None if it is not."""
    while optimizer is not None:
        state = getattr(optimizer, "_hvdlite", None) or getattr(optimizer, "_hvdlite_state", None)
        if state is not None:
            return state
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None


def build(optimizer: Any, variables: list[Any]) -> None:
    """Have the optimizer make its state for these variables, if it has none yet."""
    if hasattr(optimizer, "_create_all_weights"):  # legacy
        optimizer._create_all_weights(variables)
    elif not getattr(optimizer, "built", False):
        optimizer.build(variables)


def state_of(optimizer: Any) -> list[Any]:
    """All variables of an optimizer that is built: its slots, the learning rate, the count of steps."""
    variables = optimizer.variables
    found = list(variables() if callable(variables) else variables)
    rate = _learning_rate(optimizer)  # tf_keras does not count it among them
    if hasattr(rate, "assign") and all(variable is not rate for variable in found):
        found.append(rate)
    return found


def local_state_of(model: Any) -> list[Any]:
    """The backend's variables that each rank has for itself: local ones of the model's optimizers, and their slots."""
    found: list[Any] = []
    for optimizer in optimizers_in(model):
        if hasattr(optimizer, "hvdlite_variables") and getattr(optimizer, "built", False):
            shared = {id(variable) for variable in optimizer.hvdlite_variables()}
            own = map(plain_variable, [*optimizer._trainable_variables, *optimizer.variables])
            found += [variable for variable in own if id(variable) not in shared]
    return found


def learning_rate_of(optimizer: Any) -> Any:
    """The variable that holds the learning rate.

    Raises:
        ArgumentError: It is a schedule's, or there are several.
    """
    if len(apart := parts_of(optimizer)) > 1:
        raise ArgumentError(
            f"this {type(innermost(optimizer)).__name__} has {len(apart)} optimizers inside, each with a learning rate of its "
            "own: make them with schedules, or set their rates, and leave out the callbacks that schedule the learning rate."
        )
    rate = _learning_rate(apart[0])
    if not hasattr(rate, "assign"):
        raise ArgumentError(
            f"the learning rate of this {type(innermost(optimizer)).__name__} is a {type(rate).__name__}, which a callback "
            "cannot set: make the optimizer with a number, or leave out the callbacks that schedule the learning rate."
        )
    return rate


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that have a learning rate: those inside of a MultiOptimizer, or the innermost one."""
    inner = innermost(optimizer)
    several = getattr(inner, "optimizers", None)
    return [part for each in several for part in parts_of(each)] if isinstance(several, list) else [inner]


def rates_of(optimizer: Any) -> tuple[float, ...]:
    """The learning rates that the next step is made with; of a MultiOptimizer all. None where an optimizer has none."""
    found = []
    for part in [] if optimizer is None else parts_of(optimizer):
        rate = getattr(part, "learning_rate", None)
        rate = rate(part.iterations) if callable(rate) else rate  # legacy optimizers return the schedule itself
        found += [] if rate is None else [float(rate)]
    return tuple(found)


def rates_of_variables(optimizer: Any) -> Callable[[], tuple[float, ...]]:
    """What tells the learning rates that an optimizer holds in variables, which callbacks set; not those of schedules.

    It does not keep the optimizer.
    """
    reference = weakref.ref(optimizer)

    def rates() -> tuple[float, ...]:
        found = [] if (there := reference()) is None else [_learning_rate(part) for part in parts_of(there)]
        return tuple(float(read(plain_variable(rate))) for rate in found if hasattr(rate, "assign"))

    return rates


def passes_of(optimizer: Any) -> int:
    """The calls of `apply_gradients`, those too that only add up gradients, which Keras 3 leaves out of ``iterations``."""
    inner = innermost(optimizer)
    return int(getattr(inner, "_iterations", inner.iterations).numpy())


def accumulated(optimizer: Any) -> int:
    """Stands for the gradients that an optimizer of Keras 3 has added up for its next update; 0 if there are none."""
    found = [] if optimizer is None else getattr(innermost(optimizer), "_accumulated_gradients", None) or []
    arrays = [each.numpy() for each in found if each is not None]
    return zlib.crc32(b"".join(array.tobytes() for array in arrays)) if any(array.any() for array in arrays) else 0


def _learning_rate(optimizer: Any) -> Any:
    """The variable or schedule that an optimizer was made with."""
    inner = innermost(optimizer)
    found = getattr(inner, "_learning_rate", None)
    return inner.learning_rate if found is None else found  # the latter for legacy ones


def velocities_of(optimizer: Any, weights: list[Any]) -> list[Any]:
    """The momentum variables that are sums of *steps*, in which past learning rates are contained: of SGD and RMSprop.

    Args:
        optimizer: Any; others sum up gradients, or have no momentum, or no state yet.
        weights: The variables that it trains.
    """
    inner = innermost(optimizer)
    if not {"SGD", "RMSprop"} & {kind.__name__ for kind in type(inner).__mro__}:
        return []
    if hasattr(inner, "get_slot_names"):  # legacy
        return (
            [inner.get_slot(weight, "momentum") for weight in weights] if "momentum" in inner.get_slot_names() else []
        )
    return [*getattr(inner, "momentums", []), *getattr(inner, "_momentums", [])]
