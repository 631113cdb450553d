"""Batch normalisation with the statistics of the global batch: the batches of all ranks as one."""

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

# tf.keras is Keras 3, or tf_keras if TF_USE_LEGACY_KERAS=1.
_Plain: Any = tf.keras.layers.BatchNormalization
_register: Any = (keras if issubclass(_Plain, keras.layers.Layer) else tf.keras).saving.register_keras_serializable


class GlobalMoments:
    """A mixin that computes the statistics of a batch normalisation layer of Keras 3 or tf_keras over all ranks.

    It comes before the layer among the bases of a class. In training both layers ask the method `_moments` for the mean and
    the variance, and compute everything else from these.
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
        return _global_moments(inputs, axes, mask, keep_dims, self.process_set)


@_register(package="hvdlite", name="SyncBatchNormalization")
class SyncBatchNormalization(GlobalMoments, _Plain):  # type: ignore[misc]  # mypy does not see Keras
    """`keras.layers.BatchNormalization` over the global batch of all ranks.

    In training, in a tf.function and eagerly, the mean and the variance are those of the samples of all ranks. Batches may
    differ in size. They may be empty on some ranks, but these ranks must run forward and backward too. In evaluation the layer
    computes what Keras' layer does. The gradients of `gamma` and `beta` are those of this rank's samples; the optimizer or the
    tape combines them with the other ranks' gradients. The forward pass and the backward pass communicate twice each, so all
    ranks must call the layers in the same order.

    With this layer each rank's loss depends on all ranks' samples, and gradients flow between the ranks, so all losses must
    have the same scale. If the batches are uneven, divide the sum of the samples' losses by the mean batch size of the ranks,
    not by this rank's batch size.

    With ``TF_USE_LEGACY_KERAS=1`` it is a layer of tf_keras; `synchronized` makes one for programs that import tf_keras itself.
    To load a saved model, import hvdlite_tf first; or, without ranks, pass to Keras
    ``custom_objects={"hvdlite>SyncBatchNormalization": keras.layers.BatchNormalization}``.

    The input is a floating-point tensor of any shape, whose dimension `axis` is the channels. float16 and bfloat16 are
    normalised with float32 statistics. The ranks exchange the statistics as float64. With a mask, only the samples count that
    the mask lets through.

    Args:
        fused: Horovod's argument, which must be False.
        process_set: The ranks that take part; None means all ranks. The process set is not saved with the model.
        **kwargs: The arguments of `keras.layers.BatchNormalization`: axis, momentum, epsilon, …

    Raises:
        ArgumentError: `fused` is not False, or `renorm`, `virtual_batch_size` or `synchronized` is given, or Keras 3 has
            another backend than TensorFlow.
        NotInitializedError: The layer is called in training before `init`.

    Examples:
        >>> def normalized():
        ...     layer = hvd.SyncBatchNormalization(center=False, scale=False)
        ...     return round(float(layer(tf.constant([[1.0 + 2 * hvd.rank()]]), training=True)[0, 0]), 2)
        >>> on_ranks(2, normalized)  # of 1 and 3, whose mean is 2 and whose variance is 1
        [-1.0, 1.0]
    """


# Files name a layer's weights by the class's name, so a plain layer can read the weights from them too.
SyncBatchNormalization.__name__ = "BatchNormalization"


def synchronized(layer: type[Any]) -> type[Any]:
    """Return `SyncBatchNormalization` as a subclass of another layer, such as ``tf_keras.layers.BatchNormalization``.

    Args:
        layer: A class that asks a method `_moments` for its statistics, as the layers of Keras 3 and tf_keras do.

    Raises:
        ArgumentError: `layer` is not a class with a method `_moments`.
    """
    if not (isinstance(layer, type) and hasattr(layer, "_moments")):
        raise ArgumentError(f"expected a batch normalisation layer of Keras 3 or tf_keras; got {layer!r}.")
    return type("SyncBatchNormalization", (GlobalMoments, layer), {"__doc__": SyncBatchNormalization.__doc__})


def _global_moments(
    inputs: tf.Tensor, axes: Sequence[int], mask: Any, keep_dims: bool, process_set: ProcessSet | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the mean and the biased variance over the batches of all ranks.

    The ranks first compute the joint mean, and then sum the squared deviations from it. Sums of the values and of their squares
    would lose digits if the mean is far larger than the deviations; these sums do not. The exchanges are differentiable, so
    automatic differentiation finds the gradient of Ioffe & Szegedy, "Batch normalization", ICML 2015, section 3.

    Args:
        inputs: This rank's input, in float32 or wider.
        axes: All dimensions except the channels' dimension.
        mask: None, or a tensor that says which samples count, of the shape of `inputs` without the last dimension.
        keep_dims: Whether the results keep dimensions of size 1 in the place of `axes`.
        process_set: The ranks that take part; None means all ranks.
    """
    here = world("SyncBatchNormalization()").engine(process_set)
    chosen = process_set or hvdlite.global_process_set
    if mask is None:
        counted: Any = inputs
        number = tf.reduce_prod(tf.gather(tf.shape(inputs, tf.int64), list(axes)))
    else:
        let_through = tf.cast(mask, tf.bool)[..., tf.newaxis]  # not a product, because 0 × NaN is NaN
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
