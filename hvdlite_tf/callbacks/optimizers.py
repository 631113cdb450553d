"""What Keras 3, tf_keras and its legacy optimizers call differently."""

from __future__ import annotations

from typing import Any

from hvdlite.errors import ArgumentError
from hvdlite_tf.tensor import plain_variable, zeros_like


def innermost(optimizer: Any) -> Any:
    """The optimizer inside of a LossScaleOptimizer; any other as it is."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


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


def learning_rate_of(optimizer: Any) -> Any:
    """The variable that holds the learning rate.

    Raises:
        ArgumentError: It is a schedule's.
    """
    rate = _learning_rate(optimizer)
    if not hasattr(rate, "assign"):
        raise ArgumentError(
            f"the learning rate of this {type(innermost(optimizer)).__name__} is a {type(rate).__name__}, which a callback "
            "cannot set: make the optimizer with a number, or leave out the callbacks that schedule the learning rate."
        )
    return rate


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


def exchange_zeros(optimizer: Any, variables: list[Any]) -> None:
    """Let a distributed optimizer exchange gradients of zeros once, and not apply them: what that takes is there then.

    Args:
        optimizer: Any; nothing happens for one that is not distributed.
        variables: The variables that it trains, the same on every rank. Every rank calls this.

    Raises:
        MismatchError: The ranks have different variables. Raised on all of them.
    """
    while optimizer is not None:
        state = getattr(optimizer, "_hvdlite", None) or getattr(optimizer, "_hvdlite_state", None)
        if state is not None:
            plain = [plain_variable(variable) for variable in variables]
            shared, zeros = state.local.split(plain, [zeros_like(variable) for variable in plain])
            state.exchange.combine(shared, zeros)
        optimizer = getattr(optimizer, "inner_optimizer", None)
