"""The types that all contracts use: arrays, the op of a reduction, and the dtype and shape of a tensor."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

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
