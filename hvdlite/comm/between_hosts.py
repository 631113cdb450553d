"""Reductions between hosts. Sums of float16 and bfloat16 travel as such: for the link between hosts they were made small.

Each host rounds the sum of its ranks. One host sums a slice of all of them, as float32, and rounds once more::

    sum of this host (float32) ─▶ divide ─▶ 16 bits ─▶ alltoall ─▶ sum of a slice (float32) ─▶ 16 bits ─▶ allgather

That is half of the bytes of a sum in float32. With one rank on each host, the first rounding changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hvdlite.algorithms.slices import split
from hvdlite.protocols import Array, Collectives, ReduceOp
from hvdlite.tensors.numpy_adapter import HALF_DTYPES
from hvdlite.tensors.reduction import Reduction

_SMALLEST_BYTES = 2**14
"""A smaller sum travels as float32, in one operation: there the number of messages matters, not their size."""


def reduce_between_hosts(
    cross: Collectives, how: Reduction, wide: Array, result: Array, divide: Callable[[Array], None]
) -> None:
    """Reduce over the hosts, and divide.

    Args:
        cross: The ranks of all hosts that reduce this chunk.
        how: How values are combined.
        wide: The result of this host, of dtype `wide_dtype`. It is overwritten.
        result: Where the result is wanted, of dtype `storage`. It may be `wide`.
        divide: Divides a sum in place.
    """
    if how.dtype not in HALF_DTYPES or how.combining is not ReduceOp.SUM or wide.nbytes < _SMALLEST_BYTES:
        cross.allreduce(wide, how.combining)
        divide(wide)
        if wide is not result:
            how.narrow(wide, result)
        return
    counts = split(wide.size, cross.size)
    own = np.empty(counts[cross.rank], how.storage)
    scatter_sum(cross, how, wide, own, counts, divide)
    cross.allgather(own, result, counts)


def scatter_sum(
    cross: Collectives,
    how: Reduction,
    wide: Array,
    own: Array,
    counts: Sequence[int],
    divide: Callable[[Array], None],
) -> None:
    """Sum over the hosts, divide, and keep this host's slice.

    Args:
        cross, how, wide, divide: See `sum_between_hosts`.
        own: Where the slice is wanted, of dtype `storage`: shape ``(counts[cross.rank],)``.
        counts: The number of elements of each host's slice.
    """
    share = np.empty(own.size, how.wide_dtype)
    if how.exact:
        cross.reduce_scatter(wide, share, counts, ReduceOp.SUM)
        divide(share)
    else:
        divide(wide)  # before the rounding, so that it stays within the range of 16 bits
        sent = np.empty(wide.size, how.storage)
        how.narrow(wide, sent)
        received = np.empty(cross.size * own.size, how.storage)
        cross.alltoall(sent, counts, received, [own.size] * cross.size)
        how.combine(list(received.reshape(cross.size, own.size)), share)
    how.narrow(share, own)
