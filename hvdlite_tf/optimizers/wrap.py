"""`DistributedOptimizer`: the one-line wrap, for the optimizers of Keras 3, of tf_keras, and of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.adapter.few_bytes.local_steps import LocalSGD
from hvdlite.adapter.options import ExchangeOptions, check_passes, combined_by
from hvdlite.api import world
from hvdlite.errors import ArgumentError
from hvdlite.gradients.aggregator import Aggregator
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_tf.optimizers.keras import distribute_keras
from hvdlite_tf.variables import need_tensorflow, tensorflow

Opt = TypeVar("Opt")


def DistributedOptimizer(
    optimizer: Opt,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor | Aggregator = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = hvdlite.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = hvdlite.global_process_set,
    scale_local_gradients: bool = True,
    *,
    aggregator: Aggregator | None = None,
    local_steps: LocalSGD | None = None,
    shard: bool = False,
) -> Opt:
    """Make `optimizer` apply the gradients of all ranks. Every rank calls this, with optimizers of the same variables.

    Use it for ``model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)))`` and `fit`, and for training
    loops with ``optimizer.apply_gradients``, in a tf.function or not. The optimizer clips the combined gradients. With
    ``gradient_accumulation_steps`` the ranks exchange gradients once per update. Saved models name the plain optimizer.

    A variable that has no gradient (None) on any rank is not changed, as in Keras. If a variable has a gradient on some ranks,
    its gradient on the others counts as zero. An error during an exchange in a tf.function is a TensorFlow UnknownError that
    contains the text of hvdlite's error.

    Args:
        optimizer: An optimizer of Keras 3 (on its TensorFlow or torch backend), of tf_keras (also a legacy one), or a subclass
            of ``tf.compat.v1.train.Optimizer``. It is changed and returned. A LossScaleOptimizer may be inside or outside.
        name, use_locking, device_dense, device_sparse: Horovod's arguments, which have no effect.
        compression: `Compression.none`, `Compression.fp16`, `Compression.bf16`, or a `Compressor` of the program whose results
            can be averaged; or ``Compression.powersgd(rank=4)`` or ``Compression.topk(0.01)``, which send few bytes and are
            aggregators (see `aggregator`).
        sparse_as_dense: Whether the ranks exchange the gradients of embeddings as dense tensors; if not, they exchange only the
            rows that the gradients have.
        backward_passes_per_step: The number of calls whose gradients each rank adds up; the last of them exchanges and applies
            the sum.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: With compression and Average, the gradients are divided by this factor before they are
            compressed, and multiplied by it at the end, so that the sums fit into the smaller dtype. Without compression it
            makes no difference.
        average_aggregated_gradients: Whether the optimizer applies the average of several passes instead of their sum.
        num_groups, groups: Horovod's arguments, which have no effect, because all gradients are exchanged together.
        process_set: The ranks that take part; all ranks by default.
        scale_local_gradients: Whether the gradients of local variables (see `register_local_var`) are divided by the number of
            ranks.
        aggregator: Combines the gradients in the program's own way (`hvdlite.gradients.aggregator.Aggregator` is the method
            that it needs), in host memory. Make one for each optimizer. Rows of embeddings travel as ever.
        local_steps: `LocalSGD` or `DiLoCo`: each rank steps with its own gradients, and every few steps the ranks bring their
            parameters together. Before a program evaluates or saves, ``optimizer.average_parameters()`` does that at once;
            `fit` with the callback `Distributed` does it at the end of each epoch, before validation. For Keras 3.
        shard: Whether each rank has the optimizer's state, and makes the step, of its share of the parameters only, which takes
            less time and memory; the result is the same. For Keras 3 on TensorFlow. ``optimizer.variables`` are this rank's
            then, and a program saves within ``with optimizer.whole_state():``, which every rank runs.

    Returns:
        `optimizer`, which is still an instance of its class and keeps its state. It has a new method `register_local_var`; an
        optimizer of Keras 3 also has `set_batch_weight`, `exchange_state`, `load_exchange_state` and `average_parameters`; a
        sharded one has `whole_state`.

    Raises:
        ArgumentError: `optimizer` is of an unknown kind or distributed already, or the arguments do not fit together.
        MismatchError: The ranks have different variables. All ranks raise it in their first step.

    Examples:
        >>> def step():
        ...     weight = keras.Variable([0.0])
        ...     optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        ...     optimizer.apply_gradients([(tf.constant([float(hvd.rank())]), weight)])
        ...     return weight.numpy().tolist()
        >>> on_ranks(2, step)  # the gradients of the ranks are 0 and 1
        [[-0.5], [-0.5]]
        >>> def share():
        ...     weights = keras.Variable([0.0] * 64)
        ...     optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.9), shard=True)
        ...     optimizer.apply([tf.fill([64], float(hvd.rank()))], [weights])
        ...     return weights.numpy()[0].item(), sum(each.numpy().size for each in optimizer.momentums)
        >>> on_ranks(2, share)  # each rank has the momentum of its half of the weights
        [(-0.5, 32), (-0.5, 32)]
    """
    compressor, aggregator = combined_by(compression, aggregator)
    options = ExchangeOptions(
        op, process_set, compressor, sparse_as_dense, gradient_predivide_factor, aggregator, local_steps
    )
    return distribute(
        optimizer, options, backward_passes_per_step, average_aggregated_gradients, scale_local_gradients, shard
    )


def distribute(
    optimizer: Opt,
    options: ExchangeOptions,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    scale_local_gradients: bool = True,
    shard: bool = False,
) -> Opt:
    """Make an optimizer of any kind a distributed one. See `DistributedOptimizer` for the arguments."""
    world("DistributedOptimizer()")
    check_passes(backward_passes_per_step)
    maker = _maker(optimizer)
    if options.local_steps is not None and maker is not distribute_keras:
        kind = type(optimizer)
        raise ArgumentError(
            f"local_steps={options.local_steps} is for optimizers of Keras 3; got {kind.__module__}.{kind.__qualname__}. Use "
            "keras.optimizers, or send fewer bytes by compression=hvd.Compression.powersgd(rank=4) or fp16."
        )
    if shard:
        maker = _sharding(maker, optimizer)
    wrapped: Opt = maker(
        optimizer, options, backward_passes_per_step, average_aggregated_gradients, scale_local_gradients
    )
    return wrapped


def _sharding(maker: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    if maker is not distribute_keras:
        kind = type(optimizer)
        raise ArgumentError(
            f"shard=True is for optimizers of Keras 3; got {kind.__module__}.{kind.__qualname__}. Use keras.optimizers, or "
            "leave out shard=True."
        )
    need_tensorflow("DistributedOptimizer(shard=True)")
    from hvdlite_tf.optimizers.sharded import distribute_sharded  # which imports TensorFlow

    return distribute_sharded


def _maker(optimizer: Any) -> Callable[..., Any]:
    tf = tensorflow()
    if tf is not None:  # without TensorFlow there are only optimizers of Keras 3
        from hvdlite_tf.optimizers import tf_keras, v1

        if isinstance(optimizer, tf.compat.v1.train.Optimizer):
            return v1.distribute_v1
        if tf_keras.is_tf_keras(optimizer):
            return tf_keras.distribute_tf_keras
    return distribute_keras
