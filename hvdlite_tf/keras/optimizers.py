"""The optimizers' wraps, with the arguments in the order of Horovod's Keras modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.adapter.options import Options
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_tf.gradients.local_variables import LocalVariables
from hvdlite_tf.optimizers.wrap import distribute

Opt = TypeVar("Opt")


def DistributedOptimizer(
    optimizer: Opt,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
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
    """`hvdlite_tf.DistributedOptimizer`, with the arguments in this order.

    Horovod's ``horovod.keras`` has fewer, and `num_groups` and `groups` after `op`: give those by name.

    Args:
        optimizer, compression, sparse_as_dense, gradient_predivide_factor, op, backward_passes_per_step,
            average_aggregated_gradients, process_set, scale_local_gradients: As there.
        name, device_dense, device_sparse, num_groups, groups: Horovod's, without effect.

    Returns:
        `optimizer`.

    Raises:
        ArgumentError, MismatchError: As there.
    """
    options = Options(op, process_set, compression, sparse_as_dense, gradient_predivide_factor)
    return distribute(optimizer, options, backward_passes_per_step, average_aggregated_gradients, scale_local_gradients)


def PartialDistributedOptimizer(
    optimizer: Opt,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
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
    """A `DistributedOptimizer` for a model some of whose layers every rank has for itself: their gradients are not exchanged.

    Args:
        local_layers: A layer, or several, the same on every rank. They are built.
        scale_local_gradients: Divide the gradients of these layers by the number of ranks: each rank's loss is a part of the
            mean of all.
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
            backward_passes_per_step, average_aggregated_gradients, groups, process_set: As for `DistributedOptimizer`.

    Returns:
        `optimizer`.

    Raises:
        ArgumentError: As for `DistributedOptimizer`; or `local_layers` has something that is no layer, or is not built.
        MismatchError: As for `DistributedOptimizer`.
    """
    layers = [] if local_layers is None else local_layers if isinstance(local_layers, Iterable) else [local_layers]
    LocalVariables().register_layers(layers)  # raises before the optimizer is changed
    options = Options(op, process_set, compression, sparse_as_dense, gradient_predivide_factor)
    wrapped: Any = distribute(
        optimizer, options, backward_passes_per_step, average_aggregated_gradients, scale_local_gradients
    )
    for layer in layers:
        for variable in layer.trainable_weights:
            wrapped.register_local_var(variable)
    result: Opt = wrapped
    return result
