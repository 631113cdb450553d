"""The replica context that code within `Strategy.run` sees: one replica, whose number is the rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite_tf.ops.allreduce import allreduce


class Share(NamedTuple):
    """This rank's part of a global batch.

    Attributes:
        rows: The number of this rank's rows, a float32 scalar.
        scale: `rows` divided by the ranks' mean number of rows, a float32 scalar; 1 if all ranks have equally many. If each
            rank's mean over its rows is multiplied by `scale`, the average over the ranks is the mean over the global batch.
        everybody: The number of rows of all ranks, a float32 scalar.
    """

    rows: tf.Tensor
    scale: tf.Tensor
    everybody: tf.Tensor

    @classmethod
    def of(cls, batch: Any, size: int) -> Share:
        """Make the share of a batch, which is nested tensors. All ranks call this together."""
        rows = tf.cast(rows_of(batch), tf.float32)
        everybody = allreduce(rows, op=hvdlite.Sum)
        return cls(rows, tf.math.divide_no_nan(rows, everybody / size), everybody)


def rows_of(batch: Any) -> Any:
    """Return the number of rows of the first tensor that has rows, as Keras counts them; 1 if no tensor has rows."""
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.nrows()
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if tf.is_tensor(leaf) and leaf.shape.rank != 0:
            return tf.shape(leaf)[0]
        if isinstance(leaf, np.ndarray) and leaf.ndim:  # of `train_on_batch` in an eager model
            return len(leaf)
    return 1


class RankContext(tf.distribute.ReplicaContext):  # type: ignore[misc]  # mypy does not see TensorFlow
    """The replica context of a rank.

    Attributes:
        share: This rank's share of the batch in a step of Keras; None in other code.
        optimizes: Whether an optimizer is applying gradients that are combined already.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, rank: int, share: Share | None, optimizes: bool = False
    ) -> None:
        super().__init__(strategy, rank)
        self.share = share
        self.optimizes = optimizes

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of this replica."""
        devices: tuple[str, ...] = self.strategy.extended.worker_devices
        return devices

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Reduce tensors over the ranks. The method is differentiable: the gradients are reduced in the same way.

        In a step of Keras each rank's loss, and so its gradients, are weighted by the rank's number of rows.

        Args:
            reduce_op: tf.distribute.ReduceOp.SUM or MEAN, or their names.
            value: Nested tensors.
            options: TensorFlow's argument, which has no effect.
        """
        flat = tf.nest.flatten(value)
        extended = self.strategy.extended
        if any(isinstance(each, tf.IndexedSlices) for each in flat):
            return tf.nest.pack_sequence_as(value, extended.over_ranks(reduce_op, flat))

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def reduced(*tensors: tf.Tensor) -> Any:
            def backward(*gradients: tf.Tensor) -> list[tf.Tensor]:
                if self.share is None:
                    return list(self.all_reduce(reduce_op, list(gradients)))
                scale = self.share.scale
                weighted = [tf.math.multiply_no_nan(each, tf.cast(scale, each.dtype)) for each in gradients]
                summed = self.all_reduce(reduce_op, weighted)
                # The optimizer multiplies this rank's gradients by the scale again.
                return [tf.math.divide_no_nan(each, tf.cast(scale, each.dtype)) for each in summed]

            return extended.over_ranks(reduce_op, list(tensors)), backward

        return tf.nest.pack_sequence_as(value, reduced(*flat))


def share_here() -> Share | None:
    """Return this rank's share of the batch if the running code is a step of Keras under a `Strategy`; else None."""
    context = tf.distribute.get_replica_context()
    return context.share if isinstance(context, RankContext) else None
