"""`join_stages` lets an optimizer of Keras decide by all stages, and not by the variables of one, when it clips and skips."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdlite.adapter.pipeline.stages import StageRanks
from hvdlite_tf.gradients.optimizer_parts import innermost
from hvdlite_tf.variables import times


def join_stages(optimizer: Any, stages: StageRanks) -> None:
    """Let `global_clipnorm` be the norm over the stages of a model, and all of them skip a step if one has an overflow.

    Args:
        optimizer: The optimizer of the variables of this rank's stage, plain or distributed. It is changed, once.
        stages: The ranks that have the stages.
    """
    inner = innermost(optimizer)
    if "_clip_gradients" not in vars(inner):
        object.__setattr__(inner, "_clip_gradients", lambda gradients: _clipped(inner, stages, gradients))
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and "check_finite" not in vars(optimizer):
        own = type(optimizer).check_finite

        def check_finite(gradients: Any) -> Any:
            found = stages.sum(
                float(not own(optimizer, gradients)), "the overflows that a LossScaleOptimizer has found"
            )
            return tf.constant(found == 0)

        object.__setattr__(optimizer, "check_finite", check_finite)


def _clipped(optimizer: Any, stages: StageRanks, gradients: list[Any]) -> Any:
    most = optimizer.global_clipnorm
    if optimizer.clipnorm or not most or most <= 0:
        return type(optimizer)._clip_gradients(optimizer, gradients)
    sharded = getattr(optimizer, "_hvdlite_sharded", None)
    if sharded is not None:  # this rank has pieces of its stage's gradients
        own = float(sharded.sums([sum(map(_squares, gradients), 0.0)])[0])
    else:
        if hasattr(optimizer, "_hvdlite"):
            gradients = optimizer.hvdlite_to_clip(gradients)
        own = sum(map(_squares, gradients), 0.0)
    norm = math.sqrt(stages.sum(own, "the norm of the gradients"))
    factor = most / max(norm, most) if math.isfinite(norm) else math.nan  # as Keras does
    return [times(gradient, factor) for gradient in gradients]


def _squares(gradient: Any) -> float:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return float(np.square(keras.ops.convert_to_numpy(values).astype(np.float64)).sum())
