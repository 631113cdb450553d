"""Optimizers of the same class and settings for other variables, and these variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvdlite.errors import ArgumentError
from hvdlite.protocols import Array
from hvdlite_tf.variables import is_variable, plain_variable


def variable_like(original: Any, value: Array) -> Any:
    """Make a variable in host memory that an optimizer treats as it treats the original one."""
    name = "variable" if is_variable(original) else original.name
    with keras.device("cpu:0"):
        made = keras.Variable(value, dtype=keras.backend.standardize_dtype(original.dtype), trainable=False, name=name)
    made._path = getattr(original, "path", original.name)  # Muon looks at it
    made.constraint = getattr(original, "constraint", None)
    return made


def plain_copy(optimizer: Any, **changes: Any) -> Any:
    """Make another optimizer of the same class and settings, which is not distributed and not built.

    Args:
        optimizer: The optimizer.
        changes: Settings that are others, by name.

    Raises:
        ArgumentError: The optimizer cannot be made again from its configuration.
    """
    plain = optimizer.__class__  # Keras' own class, also of a distributed optimizer
    try:
        return plain.from_config(optimizer.get_config() | changes)
    except Exception as error:
        raise ArgumentError(
            f"{plain.__name__}: another optimizer like this one is needed, and {plain.__name__}.from_config(config) fails "
            f"({type(error).__name__}: {error}). Give the class a get_config with all arguments of its constructor."
        ) from error


def copy_for(optimizer: Any, originals: Sequence[Any], variables: Sequence[Any]) -> Any:
    """Make and build another optimizer of the same class and settings, whose learning rate is a variable.

    It does not scale losses, and does not clip by a norm over all variables: that is done before a push.

    Args:
        optimizer: The optimizer.
        originals: Some of its variables.
        variables: The variables that the other optimizer has in their place, and any others after them.

    Raises:
        ArgumentError: The optimizer cannot be made again from its configuration.
    """
    copied = plain_copy(optimizer, learning_rate=0.0, loss_scale_factor=None, global_clipnorm=None)
    with keras.device("cpu:0"):
        copied.build(list(variables))
    decays = {}
    for original, variable in zip(originals, variables, strict=False):
        # TensorFlow's variable is what Keras looks at there.
        given = plain_variable(original) if is_variable(plain_variable(original)) else original
        decays[copied._var_key(variable)] = optimizer._use_weight_decay(given)
    copied._exclude_from_weight_decay_cache = decays
    return copied
