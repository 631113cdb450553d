"""Whether all ranks have the same number, which the sums that they make anyway can show.

n ranks have sent the same x if and only if n · Σx² = (Σx)² (Cauchy-Schwarz). For whole numbers below 2^16 this is exact in
float64 for up to two million ranks, and for numbers below 2^6 in float32 for up to four thousand.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from hvdlite.protocols import Array


def with_square(number: int) -> tuple[int, int]:
    """Return what a rank adds to the sums: its number, and the square of it."""
    return number, number * number


def are_equal(count: float, total: float, squares: float) -> bool:
    """Return whether all ranks have sent the same number.

    Args:
        count: The number of ranks that have sent one.
        total, squares: The sums of `with_square` of these ranks.
    """
    return int(count) * int(squares) == int(total) ** 2


def checksum(arrays: Iterable[Array], bits: int, start: int = 0) -> int:
    """Return a number of so many bits. Equal arrays have the same number; others have it by chance only.

    Args:
        arrays: The arrays, of any dtypes and shapes.
        bits: The number of bits, up to 32.
        start: A number that belongs to what is compared.
    """
    for array in arrays:
        start = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, start)
    return start & ((1 << bits) - 1)
