"""Names of modules inside ``horovod.tensorflow`` that public programs import: helper functions and classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import tensorflow as tf

import hvdlite
from hvdlite import ProcessSet, ReduceOp
from hvdlite.adapter.inner_class import InnerClass, refuse
from hvdlite.adapter.options import ExchangeOptions
from hvdlite.compat.common.basics import HorovodBasics
from hvdlite.errors import ArgumentError
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_tf.gradients.exchange import GradientExchange
from hvdlite_tf.ops.allreduce import allreduce
from hvdlite_tf.ops.arguments import check_groups
from hvdlite_tf.optimizers.v1 import DistributedV1

_ADVICE = (
    "Wrap an optimizer with hvd.DistributedOptimizer(optimizer), or a tape with hvd.DistributedGradientTape(tape)."
)

_basics = HorovodBasics(__file__)
_LegacyOptimizer = tf.compat.v1.train.Optimizer


class _DistributedOptimizer(_LegacyOptimizer, metaclass=InnerClass):  # type: ignore[misc, valid-type]  # mypy does not see it
    """The class of wrapped optimizers of TensorFlow 1. Only `DistributedOptimizer` makes them."""

    stands_for = DistributedV1
    advice = _ADVICE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotYetError, because a program cannot make optimizers of this class itself."""
        raise refuse("horovod.tensorflow._DistributedOptimizer", _ADVICE)


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = hvdlite.Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = hvdlite.global_process_set,
) -> Any:
    """Call `allreduce` with other defaults, of which the most important is Sum."""
    return allreduce(
        tensor,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def _make_allreduce_grads_fn(
    name: str,
    device_dense: str,
    device_sparse: str,
    compression: Compressor,
    sparse_as_dense: bool,
    op: ReduceOp,
    gradient_predivide_factor: float,
    groups: Any,
    process_set: ProcessSet = hvdlite.global_process_set,
) -> Callable[..., list[Any]]:
    """Return a function of gradients, and optionally their variables, that returns the gradients of all ranks.

    Args:
        name, device_dense, device_sparse: Horovod's arguments, which have no effect.
        compression, sparse_as_dense, op, gradient_predivide_factor, groups, process_set: See `DistributedGradientTape`.

    Raises:
        ArgumentError: The arguments do not fit together.
    """
    check_groups(0, groups)
    exchange = GradientExchange(
        ExchangeOptions(
            op=op,
            process_set=process_set,
            compression=compression or Compression.none,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
        )
    )

    def allreduce_grads(grads: Iterable[Any], vars: Iterable[Any] | None = None) -> list[Any]:
        gradients = list(grads)
        if vars is None and not all(isinstance(each, tf.Tensor) for each in gradients):
            raise ArgumentError(
                "without `vars` every gradient must be a dense tensor; one is None or sparse. Pass the variables too."
            )
        return exchange.combine(gradients if vars is None else list(vars), gradients)

    return allreduce_grads


def _alltoall_grad(op: Any, grad_wrt_output: Any, grad_wrt_received_splits: Any) -> NoReturn:
    raise refuse("horovod.tensorflow.mpi_ops._alltoall_grad", "Differentiate hvd.alltoall, with tf.GradientTape.")
