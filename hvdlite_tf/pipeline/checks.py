"""What cannot be trained in micro-batches: these checks raise, with the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

import hvdlite
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.ranks.process_set import ProcessSet
from hvdlite_tf.gradients.optimizer_parts import innermost
from hvdlite_tf.gradients.stepped_alone import differs_alone, steps_each_alone


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
        wrong = _wrong_with(stage, place)
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
