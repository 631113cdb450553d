"""What code within `Strategy.run` sees of the strategy: one replica, whose number is the rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

import hvdlite
from hvdlite_tf.ops.allreduce import allreduce


class Share(NamedTuple):
    """This rank's part of a global batch.

    Attributes:
        rows: How many rows it has here; a float32 scalar.
        scale: `rows` by the mean number of rows of the ranks, a float32 scalar; 1 where the batch is shared out evenly. Means
            over each rank's rows, times this, averaged over the ranks, are the means over the global batch.
    """

    rows: tf.Tensor
    scale: tf.Tensor

    @classmethod
    def of(cls, batch: Any) -> Share:
        """The share that `batch` is: nested tensors. Every rank calls this at once."""
        rows = tf.cast(rows_of(batch), tf.float32)
        return cls(rows, tf.math.divide_no_nan(rows, allreduce(rows, op=hvdlite.Average)))


def rows_of(batch: Any) -> Any:
    """The number of rows of the first tensor that has rows, as Keras counts them; 1 if none has any."""
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.nrows()
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if tf.is_tensor(leaf) and leaf.shape.rank != 0:
            return tf.shape(leaf)[0]
    return 1


class Replica(tf.distribute.ReplicaContext):  # type: ignore[misc]  # mypy does not see TensorFlow
    """The replica context of a rank.

    Attributes:
        share: Of which batch this is a step of Keras; None in other code.
        optimizes: The gradients that are applied now are those of all ranks already.
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
        """Combine tensors over the ranks. Differentiable: gradients are combined in the same way.

        In a step of Keras a rank's loss counts by the rows that it is the mean of, and so do its gradients, here as elsewhere.

        Args:
            reduce_op: tf.distribute.ReduceOp.SUM or MEAN, or their names.
            value: Nested tensors.
            options: TensorFlow's, without effect.
        """
        flat = tf.nest.flatten(value)
        extended = self.strategy.extended
        if any(isinstance(each, tf.IndexedSlices) for each in flat):
            return tf.nest.pack_sequence_as(value, extended.over_ranks(reduce_op, flat))

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def joined(*tensors: tf.Tensor) -> Any:
            def backward(*gradients: tf.Tensor) -> list[tf.Tensor]:
                if self.share is None:
                    return list(self.all_reduce(reduce_op, list(gradients)))
                scale = self.share.scale
                weighted = [tf.math.multiply_no_nan(each, tf.cast(scale, each.dtype)) for each in gradients]
                summed = self.all_reduce(reduce_op, weighted)
                # The optimizer will weigh this rank's gradients in its turn.
                return [tf.math.divide_no_nan(each, tf.cast(scale, each.dtype)) for each in summed]

            return extended.over_ranks(reduce_op, list(tensors)), backward

        return tf.nest.pack_sequence_as(value, joined(*flat))
