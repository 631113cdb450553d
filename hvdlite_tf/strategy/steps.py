"""The steps that Keras passes to `Strategy.run`: training, test and prediction steps, which refer to the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite_tf.ops.allreduce import grouped_allreduce
from hvdlite_tf.strategy.context import Share
from hvdlite_tf.strategy.extended import gather

_MAKERS = {"make_train_function": "train", "make_test_function": "test", "make_predict_function": "predict"}
_METHODS = {"train_step": "train", "test_step": "test"}


class Step(NamedTuple):
    """A step of Keras.

    Attributes:
        kind: "train", "test" or "predict".
        model: The model of the step.
    """

    kind: str
    model: Any


def step_of(function: Callable[..., Any]) -> Step | None:
    """Return the step of Keras that a function is; None if the function is something else.

    Keras 3 passes methods of the model, and a function that `make_predict_function` defines. tf_keras passes functions that its
    ``make_…_function`` define. The model is the one that the function refers to.
    """
    model = getattr(function, "__self__", None)
    if isinstance(model, keras.Model) and function.__name__ in _METHODS:
        return Step(_METHODS[function.__name__], model)
    function = inspect.unwrap(getattr(function, "python_function", function))
    made_in = getattr(function, "__qualname__", "").split(".")
    for maker, kind in _MAKERS.items():
        if maker in made_in and function.__module__.split(".")[0] in ("keras", "tf_keras"):
            referred = inspect.getclosurevars(function).nonlocals
            return Step(kind, referred.get("model", referred.get("self")))
    return None


def check_model(model: Any, strategy: tf.distribute.Strategy) -> None:
    """Raise ArgumentError if the model has a trainable variable, or a metric, that was made outside of the strategy's scope."""
    for variable in [*model.trainable_variables, *(each for metric in model.metrics for each in metric.variables)]:
        plain = variable.value if isinstance(variable, keras.Variable) else variable
        if plain._distribute_strategy is not strategy:
            raise ArgumentError(
                f"the variable {variable.path if isinstance(variable, keras.Variable) else variable.name} was made outside of "
                "this strategy, so it differs between ranks: build and compile the model within strategy.scope()."
            )


def over_batch(outputs: Any, share: Share) -> Any:
    """Average the floating-point results of a step over the rows of all ranks; other results stay unchanged."""
    flat = tf.nest.flatten(outputs)
    places = [place for place, each in enumerate(flat) if tf.is_tensor(each) and each.dtype.is_floating]
    weighted = [tf.math.multiply_no_nan(flat[place], tf.cast(share.scale, flat[place].dtype)) for place in places]
    if weighted:
        for place, mean in zip(places, grouped_allreduce(weighted, op=hvdlite.Average), strict=True):
            flat[place] = mean
    return tf.nest.pack_sequence_as(outputs, flat)


def of_all_rows(outputs: Any) -> Any:
    """Return the predictions for the rows of all ranks, in the order of the global batch."""
    return tf.nest.map_structure(gather, outputs)
