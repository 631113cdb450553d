"""What cannot be trained in micro-batches: these checks raise, with the way out."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import keras

import hvdlite
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.ranks.process_set import ProcessSet
from hvdlite_tf.gradients.optimizer_parts import innermost
from hvdlite_tf.gradients.stepped_alone import differs_alone, steps_each_alone
from hvdlite_tf.variables import plain_variable


def own_stage(stages: Sequence[Any], place: int, places: int, process_set: ProcessSet) -> tuple[keras.Model, int]:
    """Return this rank's stage, built, and how many weights the stages before have. All ranks of the pipeline call this.

    Args:
        stages: Models, or functions that make them.
        place, places: The number of this rank in the pipeline, and how many ranks there are.
        process_set: The ranks of the pipeline.

    Raises:
        ArgumentError: There are too many or too few stages, or one cannot be trained. Raised on all ranks.
    """
    stage, wrong = None, ""
    if keras.backend.backend() != "tensorflow":
        wrong = (
            f"Keras runs on {keras.backend.backend()}, and hvdlite_tf.Pipeline needs TensorFlow: set KERAS_BACKEND=tensorflow. "
            "For torch there is hvdlite_torch.Pipeline."
        )
    elif len(stages) != places:
        wrong = f"{len(stages)} stages for {places} ranks: expected one for each rank of the process set."
    else:
        stage = stages[place]
        if not isinstance(stage, keras.layers.Layer) and callable(stage):
            stage = stage()
        wrong = _wrong_with(stage, place) or _shared(stages, stage, place)
    own = (wrong, len(getattr(stage, "weights", ())) if not wrong else 0)
    everybody: list[tuple[str, int]] = hvdlite.allgather_object(own, process_set=process_set)
    for text, _ in everybody:
        if text:
            raise ArgumentError(f"Pipeline: {text}")
    assert isinstance(stage, keras.layers.Layer)
    return stage, sum(weights for _, weights in everybody[:place])


def _wrong_with(stage: Any, place: int) -> str:
    if not isinstance(stage, keras.layers.Layer):
        return (
            f"stage {place} is a {type(stage).__name__}; expected a Keras model, a layer, or a function that makes one."
        )
    if not stage.built:
        return (
            f"stage {place} ({stage.name!r}) is not built, so it has no weights yet. Begin a Sequential with "
            "keras.Input(shape), or call stage.build(input_shape) before."
        )
    if not stage.trainable_variables:
        return f"stage {place} ({stage.name!r}) has no weights that are trained: join it to its neighbour."
    return ""


def _shared(stages: Sequence[Any], own: Any, place: int) -> str:
    """Return what is wrong if another stage has a weight of this rank's, too: the ranks would train copies of it apart.

    A stage that is a function is not called for that: a layer is seen that the function names, and that this stage has.
    """
    paths = {id(weight): weight.path for weight in own.weights}
    inside = {id(layer) for layer in own._flatten_layers()}
    for number, stage in enumerate(stages):
        if number == place:
            continue
        layers = [stage] if isinstance(stage, keras.layers.Layer) else [x for x in _named(stage) if id(x) in inside]
        shared = [paths[id(weight)] for layer in layers for weight in layer.weights if id(weight) in paths]
        if shared:
            return (
                f"the stages {sorted((place, number))} have {shared[0]!r} both, and each rank would have a copy of its own. "
                "Cut so that the layers which share weights are in one stage, or make each stage layers of its own."
            )
    return ""


def _named(function: Any) -> Iterator[keras.layers.Layer]:
    """Return the layers that a function names: in its closure, its globals, its defaults or its arguments."""
    values: list[Any] = []
    while isinstance(function, functools.partial):
        values += [*function.args, *function.keywords.values()]
        function = function.func
    if inspect.isfunction(function) or inspect.ismethod(function):
        with contextlib.suppress(ValueError):  # a name of the closure has no value yet
            outside = inspect.getclosurevars(function)
            values += [*outside.nonlocals.values(), *outside.globals.values()]
        values += [each.default for each in inspect.signature(function).parameters.values()]
    return (value for value in values if isinstance(value, keras.layers.Layer))


def foreign_variables(tape: Any, stage: keras.Model) -> list[Any]:
    """Return the variables that a pass has used, and that could be trained, but are no weights of the stage."""
    own = {plain_variable(weight).ref() for weight in stage.weights}
    return [each for each in tape.watched_variables() if each.ref() not in own and each.dtype.is_floating]


def check_untrained(variables: Sequence[Any], gradients: Sequence[Any], place: int, is_last: bool) -> None:
    """Raise ArgumentError if a variable that is no weight of the stage has a gradient.

    Args:
        variables: What `foreign_variables` has found.
        gradients: Their gradients, or None.
        place: The number of the stage.
        is_last: Whether the pass had the loss in it.
    """
    for variable, gradient in zip(variables, gradients, strict=True):
        if gradient is not None:
            raise ArgumentError(
                f"Pipeline: {'the loss, or ' if is_last else ''}stage {place}, uses the variable {variable.name!r} of shape "
                f"{tuple(variable.shape)}, which can be trained and is no weight of the stage: nobody would train it, and "
                "weights of other stages are not up to date here. Let a layer of the stage have it (add_weight), and return "
                "what the loss needs; for a penalty on weights use a regularizer; make what is constant with "
                "trainable=False."
            )


def check_optimizer(optimizer: Any) -> None:
    """Raise ArgumentError if a step of the optimizer needs the variables of all stages."""
    inner = innermost(optimizer)
    if isinstance(inner, keras.optimizers.MultiOptimizer):
        raise ArgumentError(
            "Pipeline: a MultiOptimizer chooses optimizers by the variables of the model, of which a stage has some. Give "
            "compile() on each rank the optimizer of its stage."
        )
    difference = "" if steps_each_alone(inner) else differs_alone(inner)
    if difference:
        raise ArgumentError(
            f"Pipeline: {inner.__class__.__name__} does not step each variable by itself ({difference}), and this rank has the "
            "variables of one stage. Use an optimizer of Keras that does, such as Adam or Muon; or train with data "
            "parallelism, where each rank has all variables."
        )


def check_no_mask(output: Any) -> None:
    """Raise UnsupportedTensorError if a tensor has a Keras mask, which does not travel, and which the loss would count by."""
    for tensor in keras.tree.flatten(output):
        if getattr(tensor, "_keras_mask", None) is not None:
            raise UnsupportedTensorError(
                "Pipeline: the output of a stage has a Keras mask (from an Embedding with mask_zero=True, or Masking), which "
                "does not travel. Pass a sample_weight, or use masks within one stage."
            )
