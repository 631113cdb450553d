"""The parts of an optimizer that have different names in Keras 3, in tf_keras and in its legacy optimizers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from hvdlite.adapter.identity import Identity
from hvdlite.errors import ArgumentError
from hvdlite_tf.variables import plain_variable, read


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside a LossScaleOptimizer; any other optimizer unchanged."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def parts_inside(optimizer: Any) -> list[Any]:
    """Return an optimizer and the built optimizers inside it."""
    inside = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "_inner_optimizers", [])]
    built = [each for each in inside if each is not None and each.built]
    return [optimizer, *(part for each in built for part in parts_inside(each))]


def optimizers_in(model: Any) -> list[Any]:
    """Return the optimizers of a model: the one of `compile`, and those in other attributes (a GAN has two)."""
    found: list[Any] = []
    for each in (getattr(model, "optimizer", None), *vars(model).values()):
        if hasattr(each, "apply_gradients") and hasattr(each, "iterations") and all(each is not one for one in found):
            found.append(each)
    return found


def options_of(optimizer: Any) -> Any:
    """Return the options by which an optimizer (or one inside it) exchanges gradients; None if it does not exchange them."""
    state = _distributed_state_of(optimizer)
    return None if state is None else state.exchange.options


def identities_in(model: Any) -> list[Identity]:
    """Return the identities of the model's distributed optimizers."""
    states = map(_distributed_state_of, optimizers_in(model))
    return [state.identity for state in states if state is not None]


def local_steps_of(optimizer: Any) -> Any:
    """Return the steps that the ranks of an optimizer make by themselves; None if they combine gradients in each step."""
    return getattr(_distributed_state_of(optimizer), "steps", None)


def local_steps_in(model: Any) -> list[Any]:
    """Return `local_steps_of` the optimizers of a model that have them."""
    found = map(local_steps_of, optimizers_in(model))
    return [steps for steps in found if steps is not None]


def _distributed_state_of(optimizer: Any) -> Any:
    """Return the state that makes an optimizer, or one inside it, a distributed one; None if it is not."""
    while optimizer is not None:
        state = getattr(optimizer, "_hvdlite", None) or getattr(optimizer, "_hvdlite_state", None)
        if state is not None:
            return state
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None


def summed_passes_of(optimizer: Any) -> Any:
    """Return what adds up the gradients of several passes of an optimizer that cannot itself, as those of tf_keras; or None."""
    return getattr(_distributed_state_of(optimizer), "passes", None)


def has_servers(optimizer: Any) -> bool:
    """Return whether an optimizer trains with a parameter server (`AsyncDistributedOptimizer`)."""
    return hasattr(optimizer, "_hvdlite_training")


def is_sharded(optimizer: Any) -> bool:
    """Return whether each rank has a share of this optimizer's state (``shard=True``)."""
    return hasattr(optimizer, "whole_state")


@contextlib.contextmanager
def whole_state_in(model: Any) -> Iterator[None]:
    """Return a context manager: in its body any rank can save the model. Every rank calls this."""
    with contextlib.ExitStack() as stack:
        for optimizer in filter(is_sharded, optimizers_in(model)):
            stack.enter_context(optimizer.whole_state())
        yield


def trained_by(optimizer: Any) -> list[Any]:
    """Return the variables of the model that a built optimizer trains, on all ranks together."""
    found: list[Any] = optimizer.hvdlite_trained() if is_sharded(optimizer) else optimizer._trainable_variables
    return found


def build(optimizer: Any, variables: list[Any]) -> None:
    """Let the optimizer make its state for these variables, in the scope of their strategy, if it has none yet."""
    if hasattr(optimizer, "_create_all_weights"):  # legacy
        optimizer._create_all_weights(variables)
    elif not getattr(optimizer, "built", False):
        strategy = getattr(plain_variable(variables[0]), "_distribute_strategy", None) if variables else None
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            optimizer.build(variables)


def state_of(optimizer: Any) -> list[Any]:
    """Return all variables of a built optimizer: its slots, the learning rate, the count of steps.

    Of a sharded optimizer they are those that all ranks have, without slots.
    """
    if is_sharded(optimizer):
        replicated: list[Any] = optimizer.hvdlite_replicated()
        return replicated
    variables = optimizer.variables
    found = list(variables() if callable(variables) else variables)
    rate = _learning_rate(optimizer)  # tf_keras does not have it in the list
    if hasattr(rate, "assign") and all(variable is not rate for variable in found):
        found.append(rate)
    steps = local_steps_of(optimizer)
    return found if steps is None else [*found, *steps.outer_variables]


def slots_of(optimizer: Any) -> dict[str, list[Any]]:
    """Return the slots of a built optimizer of Keras 3: its lists of variables in the order of the variables that it trains.

    A list may have None for a variable that needs no slot.
    """
    known, trained = {id(variable) for variable in optimizer.variables}, optimizer._trainable_variables
    return {
        name: found
        for name, found in vars(optimizer).items()
        if isinstance(found, list) and len(found) == len(trained) and found is not optimizer._variables
        if all(slot is None or id(slot) in known for slot in found)
    }


def shared_of(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer has for all variables of the model together; not its learning rate and count."""
    apart = {id(slot) for given in slots_of(optimizer).values() for slot in given}
    apart |= {id(optimizer._iterations), id(optimizer._learning_rate)}
    return [variable for variable in optimizer.variables if id(variable) not in apart]


def learning_rate_of(optimizer: Any) -> Any:
    """Return the variable that holds the learning rate.

    Raises:
        ArgumentError: The rate comes from a schedule, or the optimizer has several rates.
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
    """Return the optimizers that have a learning rate: those inside a MultiOptimizer, or the innermost one."""
    inner = innermost(optimizer)
    several = getattr(inner, "optimizers", None)
    return [part for each in several for part in parts_of(each)] if isinstance(several, list) else [inner]


def rates_of(optimizer: Any) -> tuple[float, ...]:
    """Return the learning rates of the next step: one, or several of a MultiOptimizer, or none for None."""
    found = []
    for part in [] if optimizer is None else parts_of(optimizer):
        rate = getattr(part, "learning_rate", None)
        rate = rate(part.iterations) if callable(rate) else rate  # legacy optimizers return the schedule itself
        found += [] if rate is None else [float(rate)]
    return tuple(found)


def rates_of_variables(optimizer: Any) -> Callable[[], tuple[float, ...]]:
    """Return a function that returns the learning rates that an optimizer holds in variables, and not those of schedules.

    The function does not keep the optimizer alive.
    """
    reference = weakref.ref(optimizer)

    def rates() -> tuple[float, ...]:
        found = [] if (there := reference()) is None else [_learning_rate(part) for part in parts_of(there)]
        return tuple(float(read(plain_variable(rate))) for rate in found if hasattr(rate, "assign"))

    return rates


def settings_of(optimizer: Any) -> list[str]:
    """Return lines with the class and the settings of an optimizer that change its steps, but the learning rate.

    No rank gets those of another one, unlike the learning rate and other variables.
    """
    lines = []
    for part in parts_of(optimizer):
        lines.append(f"the optimizer is a {part.__class__.__name__}")
        with contextlib.suppress(Exception):  # classes of other people may not say them, and none does in a graph
            config = part.get_config()
            lines += [f"{name}={config[name]!r}" for name in sorted(config) if _is_setting(name, config[name])]
    return lines


def _is_setting(name: str, value: Any) -> bool:
    return name not in _NOT_COMPARED and (value is None or isinstance(value, (bool, int, float)))


_NOT_COMPARED = {"learning_rate", "name", "jit_compile", "is_legacy_optimizer", "decay"}
"""What ranks compare elsewhere, or what changes no step."""


def passes_of(optimizer: Any) -> int:
    """Return the number of calls of `apply_gradients`, including those that only accumulate gradients.

    Keras 3 does not count the latter in ``iterations``.
    """
    inner = innermost(optimizer)
    return int(getattr(inner, "_iterations", inner.iterations).numpy())


def _learning_rate(optimizer: Any) -> Any:
    """Return the learning rate of an optimizer: a variable or a schedule."""
    inner = innermost(optimizer)
    found = getattr(inner, "_learning_rate", None)
    return inner.learning_rate if found is None else found  # legacy optimizers have no `_learning_rate`


def velocities_of(optimizer: Any, weights: list[Any]) -> list[Any]:
    """Return the momentum variables of SGD and RMSprop, which are sums of *steps* and so contain past learning rates.

    Args:
        optimizer: An optimizer of any class. The result is empty for other classes, whose momentum is a sum of gradients, and
            for an optimizer without momentum or without state.
        weights: The variables that the optimizer trains.
    """
    inner = innermost(optimizer)
    if not {"SGD", "RMSprop"} & {kind.__name__ for kind in type(inner).__mro__}:
        return []
    if hasattr(inner, "get_slot_names"):  # legacy
        return (
            [inner.get_slot(weight, "momentum") for weight in weights] if "momentum" in inner.get_slot_names() else []
        )
    return [*getattr(inner, "momentums", []), *getattr(inner, "_momentums", [])]
