"""Batch normalisation with the statistics of all ranks' batches, as if they were one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet
from hvdlite.api import world
from hvdlite.errors import ArgumentError
from hvdlite_tf.ops.allreduce import allreduce
from hvdlite_tf.ops.rank_ops import check_still_alone
from hvdlite_tf.variables import need_tensorflow

# Keras 3, or tf_keras where TF_USE_LEGACY_KERAS=1 makes that tf.keras.
_Plain: Any = tf.keras.layers.BatchNormalization
_register: Any = (keras if issubclass(_Plain, keras.layers.Layer) else tf.keras).saving.register_keras_serializable


class JoinedMoments:
    """What makes a batch normalisation layer of Keras 3 or tf_keras one over all ranks: goes before it among the bases.

    Both ask `_moments` for mean and variance when they train, and do all else with what it returns.
    """

    process_set: ProcessSet | None

    def __init__(self, fused: bool | None = False, *, process_set: ProcessSet | None = None, **kwargs: Any) -> None:
        if fused is not False:
            raise ArgumentError(f"SyncBatchNormalization: fused={fused!r}: expected False; there is no fused form.")
        if kwargs.get("renorm") or kwargs.get("virtual_batch_size") is not None or kwargs.get("synchronized"):
            raise ArgumentError(
                "SyncBatchNormalization: renorm, virtual_batch_size and synchronized (over a tf.distribute.Strategy) are other "
                "ways to choose the statistics; leave them out."
            )
        if isinstance(self, keras.layers.Layer):
            need_tensorflow("SyncBatchNormalization")
        else:
            kwargs["fused"] = False  # tf_keras would take its fused form
        super().__init__(**kwargs)
        self.process_set = process_set

    def _moments(self, inputs: Any, *arguments: Any, keep_dims: bool = False, mask: Any = None) -> tuple[Any, Any]:
        # Keras 3 passes (inputs, mask), tf_keras (inputs, reduction_axes, keep_dims=, mask=).
        if isinstance(self, keras.layers.Layer):
            (mask,) = arguments
            axes: Sequence[int] = self._reduction_axes
        else:
            (axes,) = arguments
        return _joined_moments(inputs, axes, mask, keep_dims, self.process_set)


@_register(package="hvdlite", name="SyncBatchNormalization")
class SyncBatchNormalization(JoinedMoments, _Plain):  # type: ignore[misc]  # mypy does not see Keras
    """`keras.layers.BatchNormalization` over the joined batch of all ranks.

    While it trains, mean and variance are those of the samples of all ranks, in tf.function and eager; batches may differ in
    size, and may be empty on some ranks, as long as these run forward and backward too. In evaluation it is Keras' own. The
    gradients of `gamma` and `beta` are those of this rank's samples; the optimizer or tape combines them with all others.
    Forward and backward exchange twice each, so all ranks must call the layers in the same order.

    Each rank's loss depends on all ranks' samples here, and gradients flow between the ranks, so all losses must have the same
    scale. If batches are uneven, divide the sum of the samples' losses by the mean batch size of the ranks, not by this rank's.

    With ``TF_USE_LEGACY_KERAS=1`` it is a layer of tf_keras; `synchronized` makes one for programs that import tf_keras itself.
    To load a saved model, import hvdlite_tf first; or, where there are no ranks, pass Keras'
    ``custom_objects={"hvdlite>SyncBatchNormalization": keras.layers.BatchNormalization}``.

    Input of any shape, of which `axis` is the channels', in floating point; halves are normalised with float32 statistics.
    Statistics are exchanged as float64. With a mask, only the samples that it lets through count.

    Args:
        fused: Horovod's; False is the only choice.
        process_set: The ranks that take part; all by default. It is not saved with the model.
        **kwargs: As for `keras.layers.BatchNormalization`: axis, momentum, epsilon, …

    Raises:
        ArgumentError: Another `fused`, or `renorm`, `virtual_batch_size` or `synchronized`; or Keras 3 has another backend than
            TensorFlow.
        NotInitializedError: It trains before `init`.
    """


# Files name the weights of a layer by this, so that those of a plain one can be read from them.
SyncBatchNormalization.__name__ = "BatchNormalization"


def synchronized(layer: type[Any]) -> type[Any]:
    """`SyncBatchNormalization` as a subclass of another layer, such as ``tf_keras.layers.BatchNormalization``.

    Args:
        layer: A class that asks a method `_moments` for its statistics, as those of Keras 3 and tf_keras do.

    Raises:
        ArgumentError: It does not.
    """
    if not (isinstance(layer, type) and hasattr(layer, "_moments")):
        raise ArgumentError(f"expected a batch normalisation layer of Keras 3 or tf_keras; got {layer!r}.")
    return type("SyncBatchNormalization", (JoinedMoments, layer), {"__doc__": SyncBatchNormalization.__doc__})


def _joined_moments(
    inputs: tf.Tensor, axes: Sequence[int], mask: Any, keep_dims: bool, process_set: ProcessSet | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and (biased) variance over the batches of all ranks.

    First the joint mean is found, then the squared deviations from it are summed: so that nothing is lost where the mean is far
    larger than the deviations, as it would be with the sums of the values and of their squares. The exchanges are
    differentiable, so autodiff finds the gradient of Ioffe & Szegedy, "Batch normalization", ICML 2015, section 3.

    Args:
        inputs: Of this rank, in float32 or wider.
        axes: The dimensions that are not the channels'.
        mask: None, or which samples count: the shape of `inputs` without the last dimension.
        keep_dims: Leave dimensions of size 1 in the place of `axes`.
        process_set: The ranks that take part.
    """
    here = world("SyncBatchNormalization()").engine(process_set)
    chosen = process_set or hvdlite.global_process_set
    if mask is None:
        counted: Any = inputs
        number = tf.reduce_prod(tf.gather(tf.shape(inputs, tf.int64), list(axes)))
    else:
        let_through = tf.cast(mask, tf.bool)[..., tf.newaxis]  # 0 × NaN would not leave out what is masked
        counted = tf.where(let_through, inputs, 0)
        number = tf.reduce_sum(tf.cast(let_through, tf.int64))
    sums = tf.reduce_sum(counted, axes, keepdims=True)

    def total(values: tf.Tensor) -> tf.Tensor:
        wide = tf.cast(values, tf.float64)
        if here.size > 1:
            return allreduce(wide, op=hvdlite.Sum, process_set=chosen)
        check_still_alone(chosen)
        return wide

    flat = tf.concat([tf.cast(tf.reshape(sums, [-1]), tf.float64), [tf.cast(number, tf.float64)]], 0)
    totals = total(flat)
    count = tf.maximum(totals[-1], 1.0)
    mean = tf.cast(tf.reshape(totals[:-1] / count, tf.shape(sums)), inputs.dtype)
    deviations = inputs - mean if mask is None else tf.where(let_through, inputs - mean, 0)
    squares = total(tf.reduce_sum(tf.square(deviations), axes, keepdims=True))
    variance = tf.cast(squares / count, inputs.dtype)
    if keep_dims:
        return mean, variance
    return tf.squeeze(mean, axes), tf.squeeze(variance, axes)
