"""How NumPy does what a ReduceOp says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvdlite.protocols.types import Array, ReduceOp

Combine = Callable[[Array, Array], None]
"""``combine(into, other)``: ``into[...] = into (op) other``."""


_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def ufunc_of(op: ReduceOp) -> np.ufunc:
    """NumPy's function for `op` (not AVERAGE, not ADASUM)."""
    return _UFUNCS[op]


def numpy_combine(op: ReduceOp) -> Combine:
    """The `Combine` of `op` for NumPy arrays."""
    ufunc = ufunc_of(op)

    def combine(into: Array, other: Array) -> None:
        ufunc(into, other, out=into)

    return combine
