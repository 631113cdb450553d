"""The types that all contracts use: arrays, the op of a reduction, also by NumPy, and the dtype and shape of a tensor."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
"""A NumPy array. Between the rooms it is flat and C-contiguous unless the docstring says otherwise."""


class ReduceOp(enum.Enum):
    """The operation that combines the values of all ranks.

    Examples:
        >>> operations = hvdlite.Sum, hvdlite.Average, hvdlite.Min, hvdlite.Max, hvdlite.Product
        >>> [on_ranks(3, lambda: hvdlite.allreduce(np.array([1 + hvdlite.rank()]), op).item())[0] for op in operations]
        [6, 2, 1, 3, 6]
    """

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"

    __hash__ = object.__hash__  # Enum's own __hash__ is a Python function, and every operation looks ops up

    def __repr__(self) -> str:
        return self.name.capitalize()


class TensorInfo(NamedTuple):
    """The dtype and the shape of a tensor, which the ranks must agree on."""

    dtype: str
    """The name of the dtype in NumPy, or ``"bfloat16"``."""
    shape: tuple[int, ...]


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
