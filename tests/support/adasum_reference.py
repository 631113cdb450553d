"""Adasum as in the paper (arXiv:2006.02924), in float64 and by recursion: the reference for the tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.protocols import Array


def of_two(a: Array, b: Array) -> Array:
    """Return the Adasum of two vectors (arXiv:2006.02924, section 3). If one vector is zero, return the other one."""
    dot, aa, bb = float(np.vdot(a, b)), float(np.vdot(a, a)), float(np.vdot(b, b))
    if aa == 0 or bb == 0:
        result: Array = a + b
        return result
    result = (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b
    return result


def adasum_of(vectors: Sequence[Array]) -> Array:
    """Return the Adasum of one vector per rank, in float64.

    If the number of ranks is not a power of two, the first vectors are combined in pairs, so that a power of two is left.
    """
    vectors = [np.asarray(vector, np.float64) for vector in vectors]
    power = 1
    while 2 * power <= len(vectors):
        power *= 2
    extra = len(vectors) - power
    pairs = [of_two(vectors[2 * i], vectors[2 * i + 1]) for i in range(extra)]
    return _halves(pairs + vectors[2 * extra :])


def _halves(vectors: list[Array]) -> Array:
    if len(vectors) == 1:
        return vectors[0]
    middle = len(vectors) // 2
    return of_two(_halves(vectors[:middle]), _halves(vectors[middle:]))
