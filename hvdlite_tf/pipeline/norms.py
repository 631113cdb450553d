"""`clip_over_stages` lets Keras' `global_clipnorm` be the norm over all stages, and not over the variables of one."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite.errors import ArgumentError
from hvdlite.process_set import ProcessSet


def clip_over_stages(optimizer: Any, process_set: ProcessSet) -> None:
    """Let an optimizer of Keras clip by the norm over the stages of a model. It is changed, once.

    Args:
        optimizer: The optimizer of the variables of this rank's stage, plain or distributed.
        process_set: The ranks that have the stages.

    Raises:
        ArgumentError: The gradients are combined over the ranks after Keras has accumulated them.
    """
    if not _clips(optimizer) or "_clip_gradients" in vars(optimizer):
        return
    if optimizer.gradient_accumulation_steps and hasattr(optimizer, "_hvdlite"):
        raise ArgumentError(
            "Pipeline: global_clipnorm with gradient_accumulation_steps and DistributedOptimizer is not supported. Leave out "
            "one of them: a larger batch with more microbatches= is the same as accumulation."
        )
    plain = type(optimizer)._clip_gradients

    def clip(gradients: list[Any]) -> Any:
        if not _clips(optimizer):
            return plain(optimizer, gradients)
        own = sum((_squares(gradient) for gradient in gradients), 0.0)
        sharded = getattr(optimizer, "_hvdlite_sharded", None)
        if sharded is not None:  # this rank has pieces of its stage's gradients
            own = float(sharded.sums([own])[0])
        what = "the norm of the gradients of all stages of a Pipeline"
        norm = float(np.sqrt(hvdlite.allreduce(np.array(own), hvdlite.Sum, what, process_set=process_set)))
        most = optimizer.global_clipnorm
        factor = most / max(norm, most) if np.isfinite(norm) else np.nan  # as Keras does
        return [_times(gradient, factor) for gradient in gradients]

    object.__setattr__(optimizer, "_clip_gradients", clip)


def _clips(optimizer: Any) -> bool:
    return not optimizer.clipnorm and bool(optimizer.global_clipnorm) and optimizer.global_clipnorm > 0


def _squares(gradient: Any) -> float:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return float(np.square(keras.ops.convert_to_numpy(values).astype(np.float64)).sum())


def _times(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            gradient.values * tf.cast(factor, gradient.dtype), gradient.indices, gradient.dense_shape
        )
    return gradient * tf.cast(factor, gradient.dtype)
