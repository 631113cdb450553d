"""`Strategy`: a strategy of `tf.distribute` whose replicas are the ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import hvdlite
from hvdlite.api import world
from hvdlite.errors import ArgumentError
from hvdlite_tf.ops.allreduce import grouped_allreduce
from hvdlite_tf.strategy.context import RankContext, Share
from hvdlite_tf.strategy.extended import Extended, gather, op_over_ranks
from hvdlite_tf.strategy.losses import losses_of_all_rows
from hvdlite_tf.strategy.optimizers import prepare
from hvdlite_tf.variables import need_tensorflow


class Strategy(tf.distribute.Strategy):  # type: ignore[misc]  # mypy does not see TensorFlow
    """A strategy like `tf.distribute.MultiWorkerMirroredStrategy`, whose workers are the ranks of the job::

        strategy = hvd.Strategy()
        with strategy.scope():
            model = keras.Sequential([…])
            model.compile(optimizer="adam", loss="mse", metrics=["mae"])
        model.fit(dataset_of_global_batches)

    Every rank makes a strategy after `init`. It serves `fit`, `evaluate` and `predict` of Keras 3 and tf_keras, and training
    loops that use `run`, `reduce`, `gather`, `experimental_distribute_dataset`, `distribute_datasets_from_function` and
    `num_replicas_in_sync`. Batches are global: each rank computes on its part of the rows. Training equals that of one process
    on the global batches, also on uneven ones. Metrics are about all rows, and predictions are in the order of the rows. See
    ``hvdlite docs strategy``.

    Variables that are made in the scope begin with rank 0's values on all ranks. If no rank has called `tf.random.set_seed`,
    the strategy calls it with the same number on all ranks, so that all ranks shuffle their datasets in the same order.

    Raises:
        NotInitializedError: `init` has not been called.
        ArgumentError: The process sees GPUs, which the strategy does not use yet; or this is within the scope of another
            strategy; or Keras has another backend than TensorFlow.

    Examples:
        >>> def summed():
        ...     strategy = hvd.Strategy()
        ...     own = strategy.run(lambda: tf.constant(1.0 + hvd.rank()))
        ...     return strategy.reduce(tf.distribute.ReduceOp.SUM, own, axis=None).numpy().item()
        >>> on_ranks(2, summed)
        [3.0, 3.0]
    """

    hvdlite_combines_gradients = True
    """Tells the callbacks' checks that a model under this strategy needs no distributed optimizer."""

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
        """Set TensorFlow's seed to the same number on all ranks, unless the program has set one."""
        own, _ = tf.compat.v1.get_seed(None)
        drawn = int(np.random.default_rng().integers(2**31))
        seeds = hvdlite.allgather_object((own, drawn))
        if all(given is None for given, _ in seeds):
            tf.random.set_seed(seeds[0][1])

    @property
    def cluster_resolver(self) -> Any:
        """A cluster resolver for programs that ask for one: its `task_type` is "worker", and its `task_id` is the rank.

        Rank 0 is the chief, as worker 0 is in a cluster without an explicit chief. The addresses in `cluster_spec` are made up.
        """
        here = world("cluster_resolver")
        workers = tf.train.ClusterSpec({"worker": [f"rank{rank}:0" for rank in range(here.topology.size)]})
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            workers, task_type="worker", task_id=here.topology.rank
        )

    def scope(self) -> AbstractContextManager[Any]:
        """Return the context in which models, optimizers, metrics and other variables are made.

        Every rank makes the same variables in the same order.

        Raises:
            ArgumentError: This is within the scope of another strategy.
        """
        self.extended.check_world()
        if tf.distribute.has_strategy() and tf.distribute.get_strategy() is not self:
            raise ArgumentError("strategy.scope() within the scope of another strategy: strategies do not nest.")
        scope: AbstractContextManager[Any] = super().scope()
        return scope

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Call `fn` on every rank with that rank's arguments.

        Within `fn`, ``tf.distribute.get_replica_context()`` has `all_reduce`, `all_gather`, and the rank as
        `replica_id_in_sync_group`. Optimizers apply the sum of all ranks' gradients, so divide losses by the size of the global
        batch (``tf.nn.compute_average_loss(losses, global_batch_size=…)``).

        Args:
            fn: A function of eager code, or a tf.function.
            args, kwargs: This rank's arguments for `fn`, nested tensors.
            options: TensorFlow's argument, which has no effect.

        Returns:
            The result of `fn` on this rank. For a prediction step of Keras, the predictions of all ranks.
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
        share = Share.of((args, kwargs), hvdlite.size())
        with self.extended.step_of(share, step.model), losses_of_all_rows(step.model, share):
            outputs = super().run(fn, args, kwargs, options)
        return over_batch(outputs, share)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Reduce the results of `run` over the ranks. Every rank calls this.

        Args:
            reduce_op: "SUM" or "MEAN", or a `tf.distribute.ReduceOp`.
            value: This rank's result, nested tensors.
            axis: One or several dimensions that are reduced too, before the reduction over the ranks. "MEAN" is then the mean
                over all elements along these dimensions on all ranks; the ranks may have different numbers of them.

        Returns:
            The reduced tensors, the same on all ranks.

        Raises:
            ArgumentError: `reduce_op` is something else, or the call is within `run`.
        """
        self.extended.check_world()
        op = op_over_ranks(reduce_op)
        if isinstance(tf.distribute.get_replica_context(), RankContext):
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
        summed = self.extended.over_ranks("SUM", [*sums, *counts])
        means = [
            tf.math.divide_no_nan(total, tf.cast(count, total.dtype))
            for total, count in zip(summed[: len(flat)], summed[len(flat) :], strict=True)
        ]
        return tf.nest.pack_sequence_as(value, means)

    def distribute_optimizer(self, optimizer: Any) -> Any:
        """Let an optimizer exchange gradients before it clips, checks and accumulates them. For training loops without `fit`.

        `fit` does this itself. Without it, an optimizer of Keras 3 clips each rank's own gradients, as it does under
        MultiWorkerMirroredStrategy, and with a LossScaleOptimizer the ranks would not skip the same steps.

        Args:
            optimizer: An optimizer of Keras 3 or tf_keras, which is changed and returned. Call its `apply_gradients` within
                `run`.

        Raises:
            ArgumentError: `optimizer` is not such an optimizer, or is a `DistributedOptimizer`.
        """
        return prepare(optimizer, self)


_MAKERS = {"make_train_function": "train", "make_test_function": "test", "make_predict_function": "predict"}
_METHODS = {"train_step": "train", "test_step": "test"}


class KerasStep(NamedTuple):
    """A step of Keras.

    Attributes:
        kind: "train", "test" or "predict".
        model: The model of the step.
    """

    kind: str
    model: Any


def step_of(function: Callable[..., Any]) -> KerasStep | None:
    """Return the step of Keras that a function is; None if the function is something else.

    Keras 3 passes methods of the model, and a function that `make_predict_function` defines. tf_keras passes functions that its
    ``make_…_function`` define. The model is the one that the function refers to.
    """
    model = getattr(function, "__self__", None)
    if isinstance(model, keras.Model) and function.__name__ in _METHODS:
        return KerasStep(_METHODS[function.__name__], model)
    function = inspect.unwrap(getattr(function, "python_function", function))
    made_in = getattr(function, "__qualname__", "").split(".")
    for maker, kind in _MAKERS.items():
        if maker in made_in and function.__module__.split(".")[0] in ("keras", "tf_keras"):
            referred = inspect.getclosurevars(function).nonlocals
            return KerasStep(kind, referred.get("model", referred.get("self")))
    return None


def check_model(model: Any, strategy: tf.distribute.Strategy) -> None:
    """Raise ArgumentError if the model has a trainable variable, or a metric, that was made outside of the strategy's scope."""
    for variable in [*model.trainable_variables, *(each for metric in model.metrics for each in metric.variables)]:
        plain = variable.value if isinstance(variable, keras.Variable) else variable
        if plain._distribute_strategy is not strategy:
            raise ArgumentError(
                f"the variable {variable.path if isinstance(variable, keras.Variable) else variable.name} was made outside of "
                "this strategy, so it differs between ranks: build and compile the model within strategy.scope()."
            )


def over_batch(outputs: Any, share: Share) -> Any:
    """Average the floating-point results of a step over the rows of all ranks; other results stay unchanged."""
    flat = tf.nest.flatten(outputs)
    places = [place for place, each in enumerate(flat) if tf.is_tensor(each) and each.dtype.is_floating]
    weighted = [tf.math.multiply_no_nan(flat[place], tf.cast(share.scale, flat[place].dtype)) for place in places]
    if weighted:
        for place, mean in zip(places, grouped_allreduce(weighted, op=hvdlite.Average), strict=True):
            flat[place] = mean
    return tf.nest.pack_sequence_as(outputs, flat)


def of_all_rows(outputs: Any) -> Any:
    """Return the predictions for the rows of all ranks, in the order of the global batch."""
    return tf.nest.map_structure(gather, outputs)
