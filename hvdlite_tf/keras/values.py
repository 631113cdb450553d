"""The operations in the form of ``horovod.keras``: they take numbers as well as tensors, and have fewer arguments.

`hvdlite` describes what each operation does. Each function here takes a number, an array, a tensor or a variable, and returns a
tensor. A float of Python becomes float32, as everywhere in TensorFlow.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite import Average, ReduceOp
from hvdlite.tensors.compression import Compression, Compressor
from hvdlite_tf.ops import allgather as gathering
from hvdlite_tf.ops import allreduce as reducing
from hvdlite_tf.ops import broadcast as broadcasting
from hvdlite_tf.ops import reducescatter as scattering
from hvdlite_tf.variables import plain_variable


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Compressor = Compression.none,
) -> Any:
    """Reduce a value over the ranks. See `hvdlite_tf.allreduce` for arguments and errors.

    The value may be a number; the result is a tensor of its shape and dtype.

    Examples:
        >>> on_ranks(2, lambda: hvd.allreduce(hvd.rank(), op=hvd.Sum).numpy().item())
        [1, 1]
    """
    return reducing.allreduce(
        _tensor(value),
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate the ranks' values along the first dimension. See `hvdlite_tf.allgather` for result and errors.

    The value may be a number, which counts as one row.

    Examples:
        >>> on_ranks(2, lambda: hvd.allgather(hvd.rank()).numpy().tolist())
        [[0, 1], [0, 1]]
    """
    return gathering.allgather(_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Give every rank the root's value. See `hvdlite_tf.broadcast` for arguments and errors.

    The value may be a number; the result is a tensor of its shape and dtype.

    Examples:
        >>> on_ranks(2, lambda: hvd.broadcast(hvd.rank(), root_rank=1).numpy().item())
        [1, 1]
    """
    return broadcasting.broadcast(_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Any:
    """Reduce a value over the ranks and keep this rank's rows. See `hvdlite_tf.reducescatter` for arguments, result and errors.

    The value may be an array, a tensor or a variable of at least one dimension.

    Examples:
        >>> on_ranks(2, lambda: hvd.reducescatter(np.array([1.0, 2.0]), op=hvd.Sum).numpy().tolist())
        [[2.0], [4.0]]
    """
    return scattering.reducescatter(_tensor(value), op=op, name=name)


def _tensor(value: Any) -> Any:
    return value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(plain_variable(value))
