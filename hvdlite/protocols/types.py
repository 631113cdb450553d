"""What the contracts speak of: arrays, reductions, what is known of a tensor."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from numpy.typing import NDArray

Array = NDArray[Any]
"""A NumPy array. Between the layers it is one-dimensional and C-contiguous unless said otherwise."""


class ReduceOp(enum.Enum):
    """How the values of the ranks become one."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"

    __hash__ = object.__hash__  # Enum's own is a call of Python, and these are looked up in every call

    def __repr__(self) -> str:
        return self.name.capitalize()


class TensorInfo(NamedTuple):
    """What the ranks must agree on about a tensor, without its values."""

    dtype: str
    """NumPy's name of the dtype, or ``"bfloat16"``."""
    shape: tuple[int, ...]
