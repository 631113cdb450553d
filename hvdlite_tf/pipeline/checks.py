"""What cannot be trained in micro-batches: these checks raise, with the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

import hvdlite
from hvdlite.errors import ArgumentError, UnsupportedTensorError
from hvdlite.process_set import ProcessSet


def own_stage(stages: Sequence[Any], place: int, places: int, process_set: ProcessSet) -> keras.Model:
    """Return this rank's stage, built. All ranks of the pipeline call this.

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
    everybody: list[str] = hvdlite.allgather_object(wrong, process_set=process_set)
    for text in everybody:
        if text:
            raise ArgumentError(f"Pipeline: {text}")
    assert isinstance(stage, keras.layers.Layer)
    return stage


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
    """Raise ArgumentError if the optimizer scales losses."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ArgumentError(
            "Pipeline: scaled losses (LossScaleOptimizer, mixed_float16) are not supported. Use bfloat16."
        )


def check_no_mask(output: Any) -> None:
    """Raise UnsupportedTensorError if a tensor has a Keras mask, which does not travel, and which the loss would count by."""
    for tensor in keras.tree.flatten(output):
        if getattr(tensor, "_keras_mask", None) is not None:
            raise UnsupportedTensorError(
                "Pipeline: the output of a stage has a Keras mask (from an Embedding with mask_zero=True, or Masking), which "
                "does not travel. Pass a sample_weight, or use masks within one stage."
            )
