"""Reductions of NumPy arrays by a `ReduceOp`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvdlite.protocols.types import Array, ReduceOp

Combine = Callable[[Array, Array], None]
"""A function ``combine(into, other)`` that computes ``into[...] = into (op) other``."""


_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def ufunc_of(op: ReduceOp) -> np.ufunc:
    """Return NumPy's function for `op`, which is neither AVERAGE nor ADASUM."""
    return _UFUNCS[op]


def numpy_combine(op: ReduceOp) -> Combine:
    """Return the `Combine` of `op` for NumPy arrays."""
    ufunc = ufunc_of(op)

    def combine(into: Array, other: Array) -> None:
        ufunc(into, other, out=into)

    return combine
