"""`DistributedOptimizer`: the one-line wrap, for the optimizers of Keras 3, of tf_keras, and of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.adapter.options import Options, check_passes
from hvdlite.api import world
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_tf.optimizers.keras import distribute_keras
from hvdlite_tf.variables import tensorflow

Opt = TypeVar("Opt")


def DistributedOptimizer(
    optimizer: Opt,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = hvdlite.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = hvdlite.global_process_set,
    scale_local_gradients: bool = True,
) -> Opt:
    """Make `optimizer` apply the gradients of all ranks. Every rank calls this, with optimizers over the same variables.

    For ``model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)))`` and `fit`, and for loops of your
    own with ``optimizer.apply_gradients``, inside of tf.function or not. Clipping sees the combined gradients; with
    ``gradient_accumulation_steps``, gradients are exchanged once per update. Saved models name the plain optimizer.

    A variable without gradient (None) on every rank is left alone, as Keras does. One that has a gradient on some ranks counts
    as zero on the others. An error during an exchange in a tf.function comes out as TensorFlow's UnknownError, the text of ours
    in it.

    Args:
        optimizer: Of Keras 3 on its TensorFlow or torch backend, of tf_keras (also its legacy ones), or below
            ``tf.compat.v1.train.Optimizer``; it is changed and returned. A LossScaleOptimizer goes inside or outside.
        name, use_locking, device_dense, device_sparse: Horovod's, without effect.
        compression: `Compression.none`, `Compression.fp16`, `Compression.bf16`, or a `Compressor` of yours whose results may be
            averaged.
        sparse_as_dense: Exchange the gradients of embeddings as dense ones; if not, their rows alone travel.
        backward_passes_per_step: Add up the gradients of so many calls on each rank, and exchange and apply them in the last.
        op: Average, Sum, or Adasum of the gradients.
        gradient_predivide_factor: With compression and Average: gradients are divided by it before they are compressed, and
            multiplied by it in the end, so that sums fit into the smaller dtype. Without compression it makes no difference.
        average_aggregated_gradients: With several passes, apply their average and not their sum.
        num_groups, groups: Horovod's, without effect: all gradients travel together anyway.
        process_set: The ranks that take part; all by default.
        scale_local_gradients: Divide the gradients of local variables (see `register_local_var`) by the number of ranks.

    Returns:
        `optimizer`, still an instance of its class, with its state. It has `register_local_var`, too; one of Keras 3 also
        `set_batch_weight`.

    Raises:
        ArgumentError: It is no optimizer that is known, or is wrapped already, or the arguments do not fit.
        MismatchError: The ranks have different variables. Raised on all of them, in their first step.
    """
    options = Options(op, process_set, compression, sparse_as_dense, gradient_predivide_factor)
    return distribute(optimizer, options, backward_passes_per_step, average_aggregated_gradients, scale_local_gradients)


def distribute(
    optimizer: Opt,
    options: Options,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    scale_local_gradients: bool = True,
) -> Opt:
    """`DistributedOptimizer`, with arguments that have been checked; by the optimizer's kind."""
    world("DistributedOptimizer()")
    check_passes(backward_passes_per_step)
    wrapped: Opt = _maker(optimizer)(
        optimizer, options, backward_passes_per_step, average_aggregated_gradients, scale_local_gradients
    )
    return wrapped


def _maker(optimizer: Any) -> Callable[..., Any]:
    tf = tensorflow()
    if tf is not None:  # without it there is only Keras 3
        from hvdlite_tf.optimizers import tf_keras, v1

        if isinstance(optimizer, tf.compat.v1.train.Optimizer):
            return v1.distribute_v1
        if tf_keras.is_tf_keras(optimizer):
            return tf_keras.distribute_tf_keras
    return distribute_keras
