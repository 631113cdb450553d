"""Adasum as the paper has it, in float64 and by recursion: the truth for the tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.protocols import Array


def of_two(a: Array, b: Array) -> Array:
    """arXiv:2006.02924, section 3; a zero vector leaves the other as it is."""
    dot, aa, bb = float(np.vdot(a, b)), float(np.vdot(a, a)), float(np.vdot(b, b))
    if aa == 0 or bb == 0:
        result: Array = a + b
        return result
    result = (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b
    return result


def adasum_of(vectors: Sequence[Array]) -> Array:
    """Of one vector per rank. Where the ranks are no power of two, the first ones are paired until they are."""
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
