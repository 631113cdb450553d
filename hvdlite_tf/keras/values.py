"""The operations in the form that Keras programs use: on values, numbers too, with fewer arguments."""

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
    """Reduce a value over the ranks.

    Args:
        value: A number, an array, a tensor or a variable; the same shape and dtype on every rank.
        name: As in `hvdlite.allreduce`.
        average: An old spelling of `op`.
        prescale_factor, postscale_factor: As in `hvdlite.allreduce`.
        op: Average by default.
        compression: How the value travels.

    Returns:
        A tensor of its shape and dtype; Python's floats are float32, as TensorFlow has them.

    Raises:
        CommunicationError: As `hvdlite.allreduce`.
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
    """Join values of all ranks along their first dimension, which may differ.

    Args:
        value: An array, a tensor or a variable.
        name: As in `hvdlite.allgather`.

    Returns:
        A tensor with the rows of all ranks, by rank.

    Raises:
        CommunicationError: As `hvdlite.allgather`.
    """
    return gathering.allgather(_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Give every rank the root's value.

    Args:
        value: A number, an array, a tensor or a variable; the same shape and dtype on every rank.
        root_rank: Whose value everybody gets.
        name: As in `hvdlite.broadcast`.

    Returns:
        A tensor of its shape and dtype.

    Raises:
        CommunicationError: As `hvdlite.broadcast`.
    """
    return broadcasting.broadcast(_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> Any:
    """Reduce a value over the ranks, and keep this rank's share of its rows.

    Args:
        value: An array, a tensor or a variable; the same shape and dtype on every rank.
        name: As in `hvdlite.reducescatter`.
        op: Average or Sum.

    Returns:
        A tensor of this rank's rows.

    Raises:
        CommunicationError: As `hvdlite.reducescatter`.
    """
    return scattering.reducescatter(_tensor(value), op=op, name=name)


def _tensor(value: Any) -> Any:
    return value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(plain_variable(value))
