"""`Strategy`: `tf.distribute` under hvdliterun."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite.api import world
from hvdlite.errors import ArgumentError
from hvdlite_tf.strategy.context import Replica, Share
from hvdlite_tf.strategy.extended import Extended, op_over_ranks
from hvdlite_tf.strategy.optimizers import prepare
from hvdlite_tf.strategy.steps import check_model, of_all_rows, over_batch, step_of
from hvdlite_tf.variables import need_tensorflow


class Strategy(tf.distribute.Strategy):  # type: ignore[misc]  # mypy does not see TensorFlow
    """What `tf.distribute.MultiWorkerMirroredStrategy` does, with the ranks of the job for workers::

        strategy = hvd.Strategy()
        with strategy.scope():
            model = keras.Sequential([…])
            model.compile(optimizer="adam", loss="mse", metrics=["mae"])
        model.fit(dataset_of_global_batches)

    Every rank makes one, after `init`. For `fit`, `evaluate` and `predict` of Keras 3 and tf_keras, and for loops of your own:
    `run`, `reduce`, `gather`, `experimental_distribute_dataset`, `distribute_datasets_from_function`, `num_replicas_in_sync`.
    Batches are those of all ranks together; each rank computes on its part of the rows. Training is that of one process on
    the global batches, uneven ones too; metrics are those of all rows, and predictions come in their order. See
    docs/strategy.md.

    Variables made in its scope begin with rank 0's values on all ranks. If no rank has called `tf.random.set_seed`, this does,
    with the same number on all, so that datasets made later are shuffled alike.

    Raises:
        NotInitializedError: Before `init`.
        ArgumentError: There are GPUs, which it does not use yet; or within the scope of another strategy; or Keras has another
            backend than TensorFlow.
    """

    hvdlite_combines_gradients = True
    """What trains under this strategy needs no distributed optimizer."""

    def __init__(self) -> None:
        here = world("Strategy()")
        need_tensorflow("Strategy()")
        if tf.distribute.has_strategy():
            raise ArgumentError(
                "Strategy() within the scope of another strategy: make it outside; strategies do not nest."
            )
        gpus = tf.config.get_visible_devices("GPU")
        if gpus:
            raise ArgumentError(
                f"Strategy() works on CPUs only so far, and this rank sees {len(gpus)} GPUs: hide them "
                '(tf.config.set_visible_devices([], "GPU"), or CUDA_VISIBLE_DEVICES=""), or use hvd.DistributedOptimizer.'
            )
        super().__init__(Extended(self, here.topology.rank, here.topology.size))
        self._share_seed()

    def _share_seed(self) -> None:
        """Have a seed that is the same on all ranks, unless the program has set one."""
        own, _ = tf.compat.v1.get_seed(None)
        drawn = int(np.random.default_rng().integers(2**31))
        seeds = hvdlite.allgather_object((own, drawn))
        if all(given is None for given, _ in seeds):
            tf.random.set_seed(seeds[0][1])

    @property
    def cluster_resolver(self) -> Any:
        """Who this is, for programs that ask a cluster: `task_type` "worker", and the rank as `task_id`.

        Rank 0 is the chief, as worker 0 is of a cluster that has no other. The addresses in `cluster_spec` are made up.
        """
        here = world("cluster_resolver")
        workers = tf.train.ClusterSpec({"worker": [f"rank{rank}:0" for rank in range(here.topology.size)]})
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            workers, task_type="worker", task_id=here.topology.rank
        )

    def scope(self) -> AbstractContextManager[Any]:
        """Where models, optimizers, metrics and other variables are made. Every rank makes the same ones in the same order.

        Raises:
            ArgumentError: Within the scope of another strategy.
        """
        self.extended.check_world()
        if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not self:
            raise ArgumentError("strategy.scope() within the scope of another strategy: strategies do not nest.")
        scope: AbstractContextManager[Any] = super().scope()
        return scope

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Call `fn` on every rank with what that rank has.

        Within, ``tf.distribute.get_replica_context()`` has `all_reduce`, `all_gather`, and the rank as
        `replica_id_in_sync_group`. Optimizers apply the sum of all ranks' gradients: divide losses by the size of the global
        batch (``tf.nn.compute_average_loss(losses, global_batch_size=…)``).

        Args:
            fn: Eager code or a tf.function.
            args, kwargs: This rank's arguments for it, nested tensors.
            options: TensorFlow's, without effect.

        Returns:
            What `fn` returned on this rank.
        """
        self.extended.check_world()
        step = step_of(fn)
        if step is None:
            return super().run(fn, args, kwargs, options)
        check_model(step.model, self)
        if step.kind == "predict":
            return of_all_rows(super().run(fn, args, kwargs, options))
        if step.kind == "train" and getattr(step.model, "optimizer", None) is not None:
            prepare(step.model.optimizer, self)
        share = Share.of((args, kwargs))
        with self.extended.step_of(share):
            outputs = super().run(fn, args, kwargs, options)
        return over_batch(outputs, share)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Combine what `run` returned on the ranks. Every rank calls this.

        Args:
            reduce_op: "SUM" or "MEAN", or `tf.distribute.ReduceOp`.
            value: Nested tensors.
            axis: Reduce these dimensions too, one or several, before the ranks are put together; "MEAN" is then over all
                elements along them on all ranks, of which each may have another number.

        Returns:
            The same on all ranks.
        """
        self.extended.check_world()
        op = op_over_ranks(reduce_op)
        if isinstance(tf.distribute.get_replica_context(), Replica):
            raise ArgumentError("strategy.reduce() within run(): use tf.distribute.get_replica_context().all_reduce().")
        flat = tf.nest.flatten(value)
        if axis is None:
            return tf.nest.pack_sequence_as(value, self.extended.over_ranks(reduce_op, flat))
        flat = [tf.convert_to_tensor(each) for each in flat]
        sums = [tf.reduce_sum(each, axis) for each in flat]
        if op is hvdlite.Sum:
            return tf.nest.pack_sequence_as(value, self.extended.over_ranks("SUM", sums))
        counts = [
            tf.cast(tf.size(each), tf.float64) / tf.cast(tf.size(total), tf.float64)
            for each, total in zip(flat, sums, strict=True)
        ]
        joined = self.extended.over_ranks("SUM", [*sums, *counts])
        means = [
            tf.math.divide_no_nan(total, tf.cast(count, total.dtype))
            for total, count in zip(joined[: len(flat)], joined[len(flat) :], strict=True)
        ]
        return tf.nest.pack_sequence_as(value, means)

    def distribute_optimizer(self, optimizer: Any) -> Any:
        """Let an optimizer exchange gradients before it clips, checks and accumulates them, in a loop of your own.

        `fit` does this by itself. Without it, an optimizer of Keras 3 clips each rank's own gradients, as it does under
        MultiWorkerMirroredStrategy; with a LossScaleOptimizer the ranks would not skip the same steps.

        Args:
            optimizer: Of Keras 3 or tf_keras. It is changed and returned. Its `apply_gradients` is called within `run`.

        Raises:
            ArgumentError: It is no such optimizer, or is a `DistributedOptimizer`.
        """
        return prepare(optimizer, self)
