"""The methods of a strategy that TensorFlow and Keras call: those of a strategy for one device, whose replicas are the ranks.

`tf.distribute.OneDeviceStrategy` does all that happens within one process. This class overrides what concerns several ranks:
their number, reductions and gathering, the initial values of variables, and datasets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

# `type(tf.distribute.OneDeviceStrategy("/cpu:0").extended)` would start TensorFlow's runtime, which the program may still
# configure.
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended

import hvdlite
from hvdlite import ReduceOp
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.api import world
from hvdlite.errors import ArgumentError
from hvdlite_tf.gradients.exchange import GradientExchange
from hvdlite_tf.ops.allgather import allgather
from hvdlite_tf.ops.allreduce import grouped_allreduce
from hvdlite_tf.strategy.context import RankContext, Share
from hvdlite_tf.strategy.dataset import DistributedDataset, distribute, meet_before_keras_reads
from hvdlite_tf.strategy.variables import create_variable

_LARGE_BYTES = 2**16
_OPS = {"SUM": hvdlite.Sum, "MEAN": hvdlite.Average}


class Extended(OneDeviceExtended):  # type: ignore[misc]  # mypy does not see TensorFlow
    """The methods that TensorFlow and Keras call. See `tf.distribute.StrategyExtended`.

    Args:
        strategy: The strategy.
        rank: This rank.
        size: The number of ranks.
    """

    def __init__(self, strategy: tf.distribute.Strategy, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._share: Share | None = None
        self._model: Any = None
        self._as_one_process = False
        self._updates = False
        super().__init__(strategy, "/cpu:0")

    def check_world(self) -> None:
        """Raise if a restart has changed this rank, or the number of ranks, which variables and traced functions know.

        Raises:
            ArgumentError: A restart has changed one of them.
        """
        here = world("Strategy").topology
        if (here.rank, here.size) != (self._rank, self._size):
            raise ArgumentError(
                f"this Strategy was made on rank {self._rank} of {self._size}, and this is rank {here.rank} of {here.size} "
                "after a restart (shutdown() and init()): make another Strategy, and build the model anew within its scope()."
            )

    # The ranks

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1 if self._as_one_process else self._size

    @contextmanager
    def as_one_process(self) -> Iterator[None]:
        """Let TensorFlow and Keras see one replica while the body runs, so that they do not scale losses."""
        before, self._as_one_process = self._as_one_process, True
        try:
            yield
        finally:
            self._as_one_process = before

    def _in_multi_worker_mode(self) -> bool:
        return True

    @property
    def _task_id(self) -> int:  # tf_keras names folders after it
        return self._rank

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank writes checkpoints."""
        return self._rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank writes summaries."""
        return self._rank == 0

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> int:
        return 0

    # Running

    def _use_merge_call(self) -> bool:
        return False

    @contextmanager
    def step_of(self, share: Share, model: Any) -> Iterator[None]:
        """Let replicas know this rank's share of the batch while the body runs, which is a step of this model."""
        self._share, self._model = share, model
        try:
            yield
        finally:
            self._share = self._model = None

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with tf.device(self._device), RankContext(self._container_strategy(), self._rank, self._share):
            return fn(*args, **kwargs)

    def _replica_ctx_update(self, var: Any, fn: Any, args: Any = (), kwargs: Any = None, group: bool = True) -> Any:
        return self._update(var, fn, args, kwargs or {}, group)

    def _update_non_slot(self, colocate_with: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        before, self._updates = self._updates, True
        try:
            return super()._update_non_slot(colocate_with, fn, args, kwargs, group)
        finally:
            self._updates = before

    @property
    def updates(self) -> bool:
        """Whether the running code assigns what is that of all ranks already: an optimizer's step, or `update`."""
        context = tf.distribute.get_replica_context()
        return self._updates or (isinstance(context, RankContext) and context.optimizes)

    def is_exact(self, variable: tf.Variable) -> bool:
        """Return whether a metric of the step counts a loss that is that of all ranks already, one for each output."""
        loss = getattr(self._model, "_compile_loss", None)
        return loss is not None and any(each.value is variable for each in loss.variables)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    # Across ranks

    def over_ranks(self, reduce_op: Any, tensors: Sequence[Any]) -> list[Any]:
        """Reduce tensors, variables or tf.IndexedSlices over the ranks as one operation."""
        context = tf.distribute.get_replica_context()
        if isinstance(context, RankContext) and context.optimizes:
            return list(tensors)
        op, own = op_over_ranks(reduce_op), [_own(tensor) for tensor in tensors]
        if op is hvdlite.Sum and _are_large(own):  # the gradients of an optimizer that is not a distributed one
            return GradientExchange(ExchangeOptions(op=op)).combine(own, own)
        return list(grouped_allreduce(own, op=op))

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        flat = tf.nest.flatten(value)
        return tf.nest.pack_sequence_as(value, self.over_ranks(reduce_op, flat))

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        return self.over_ranks(reduce_op, [value for value, _ in value_destination_pairs])

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        return tf.nest.pack_sequence_as(value, self.over_ranks(reduce_op, tf.nest.flatten(value)))

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        return gather(_own(value), axis)

    # Variables and data

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> tf.Variable:
        def create(**settings: Any) -> tf.Variable:
            return OneDeviceExtended._create_variable(self, next_creator, **settings)

        return create_variable(create, kwargs)

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> DistributedDataset:
        meet_before_keras_reads()
        return distribute(dataset, self._rank, self._size)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> DistributedDataset:
        return DistributedDataset(dataset_fn(tf.distribute.InputContext(self._size, self._rank, self._size)))

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        return value_fn(tf.distribute.experimental.ValueContext(self._rank, self._size))


def op_over_ranks(reduce_op: Any) -> ReduceOp:
    """Return hvdlite's reduction for TensorFlow's `tf.distribute.ReduceOp`, or for its name.

    Raises:
        ArgumentError: `reduce_op` is neither "SUM" nor "MEAN".
    """
    name = str(getattr(reduce_op, "value", reduce_op)).upper()
    if name not in _OPS:
        raise ArgumentError(f'a reduction over replicas is "SUM" or "MEAN"; got {reduce_op!r}.')
    return _OPS[name]


def gather(tensor: Any, axis: int = 0) -> tf.Tensor:
    """Concatenate the tensors of all ranks along `axis`, where their lengths may differ."""
    tensor = tf.convert_to_tensor(tensor)
    if axis == 0:
        gathered: tf.Tensor = allgather(tensor)
        return gathered
    dimensions = list(range(tensor.shape.rank))
    there = [dimensions.pop(axis), *dimensions]
    return tf.transpose(allgather(tf.transpose(tensor, there)), tf.math.invert_permutation(there))


def _are_large(tensors: Sequence[Any]) -> bool:
    """Return whether these are dense floating-point tensors, and large enough that buffers of their own pay off."""
    if not all(tf.is_tensor(each) and each.dtype.is_floating and each.shape.is_fully_defined() for each in tensors):
        return False
    nbytes: int = sum(each.shape.num_elements() * each.dtype.size for each in tensors)
    return nbytes >= _LARGE_BYTES


def _own(value: Any) -> Any:
    """Return this rank's value, also for a variable whose value would be reduced over all ranks."""
    return value.read_value() if isinstance(value, tf.Variable) else value
