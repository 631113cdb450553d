"""The functions that wrap optimizers, with the arguments in the order of Horovod's Keras modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.adapter.options import ExchangeOptions, combined_by
from hvdlite.gradients.aggregator import Aggregator
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_tf.gradients.local_variables import LocalVariables
from hvdlite_tf.optimizers.wrap import distribute

Opt = TypeVar("Opt")


def DistributedOptimizer(
    optimizer: Opt,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor | Aggregator = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = hvdlite.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = hvdlite.global_process_set,
    scale_local_gradients: bool = True,
) -> Opt:
    """Make `optimizer` apply the gradients of all ranks. See `hvdlite_tf.DistributedOptimizer` for arguments and errors.

    The arguments are in the order of ``horovod.tensorflow.keras``. In ``horovod.keras`` there are fewer, and `num_groups` and
    `groups` come after `op`: pass these two by name.

    Examples:
        >>> def step():
        ...     weight = keras.Variable([0.0])
        ...     optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        ...     optimizer.apply_gradients([(tf.constant([float(hvd.rank())]), weight)])
        ...     return weight.numpy().tolist()
        >>> on_ranks(2, step)  # the gradients of the ranks are 0 and 1
        [[-0.5], [-0.5]]
    """
    compressor, aggregator = combined_by(compression, None)
    options = ExchangeOptions(op, process_set, compressor, sparse_as_dense, gradient_predivide_factor, aggregator)
    return distribute(optimizer, options, backward_passes_per_step, average_aggregated_gradients, scale_local_gradients)


def PartialDistributedOptimizer(
    optimizer: Opt,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor | Aggregator = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = hvdlite.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = hvdlite.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Opt:
    """Make a `DistributedOptimizer` for a model with local layers, whose weights and gradients each rank keeps to itself.

    See `hvdlite_tf.DistributedOptimizer` for the other arguments and the errors.

    Args:
        local_layers: A layer or several layers of the model, the same on every rank. They must be built.
        scale_local_gradients: Whether the gradients of these layers are divided by the number of ranks, because each rank's
            loss is a part of the mean of all losses.

    Returns:
        `optimizer`.

    Raises:
        ArgumentError: `local_layers` contains something that is not a layer, or a layer that is not built.

    Examples:
        >>> def step():
        ...     own, common = (keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros") for _ in range(2))
        ...     own.build((1, 1)), common.build((1, 1))
        ...     optimizer = keras.optimizers.SGD(1.0)
        ...     hvd.PartialDistributedOptimizer(optimizer, local_layers=own, scale_local_gradients=False)
        ...     gradient = tf.constant([[float(hvd.rank())]])
        ...     optimizer.apply_gradients([(gradient, own.kernel), (gradient, common.kernel)])
        ...     return own.kernel.numpy().item(), common.kernel.numpy().item()
        >>> on_ranks(2, step)
        [(0.0, -0.5), (-1.0, -0.5)]
    """
    layers = [] if local_layers is None else local_layers if isinstance(local_layers, Iterable) else [local_layers]
    LocalVariables().register_layers(layers)  # raises before the optimizer is changed
    compressor, aggregator = combined_by(compression, None)
    options = ExchangeOptions(op, process_set, compressor, sparse_as_dense, gradient_predivide_factor, aggregator)
    wrapped: Any = distribute(
        optimizer, options, backward_passes_per_step, average_aggregated_gradients, scale_local_gradients
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            wrapped.register_local_var(variable)
    result: Opt = wrapped
    return result
