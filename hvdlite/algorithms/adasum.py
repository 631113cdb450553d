"""Adasum: gradients that point the same way are averaged, orthogonal ones are added."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from hvdlite.algorithms.fold import Core
from hvdlite.errors import UnsupportedTensorError
from hvdlite.protocols import Array, Transport

_CHUNK = 8192
"""How many elements are converted to float64 at once for a dot product: they stay in the cache, and BLAS uses one thread."""


def adasum(transport: Transport, data: Array, counts: Sequence[int]) -> None:
    """Combine tensors over the ranks by Adasum, in place, to the same bits on every rank.

    Two vectors a and b become ::

        (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b

    This is their mean if they are parallel, and their sum if they are orthogonal. If one is zero, the result is the other.
    More vectors are combined in pairs, pairs of pairs and so on. The pairs are neighbours (`Core`): for 8, 6 and 3 ranks
    ((01)(23))((45)(67)), ((01)(23))(45) and (01)2. The result depends on this order, which is the same in every run.

    The algorithm is recursive halving, as in `rabenseifner`: two partners halve the range on which both work, and each
    receives the other's values of the half that it keeps. Neither has the whole of a or b, so each computes the dot products of
    its part, and these are summed over the ranks that have the other parts. An allgather in the reverse order completes the
    vector. All tensors travel together.

    Cost for P = 2ᵏ ranks, n bytes and T tensors: (2k + k(k+1)/2)α + 2(P-1)/P·nβ, and 24T bytes in k(k+1)/2 of the messages.
    If P is not a power of two, the extra ranks are folded in beforehand and out afterwards.

    Args:
        transport: The transport over the ranks.
        data: The tensors, one after the other: shape ``(sum(counts),)``, float32 or float64.
        counts: The number of elements of each tensor. Each tensor is combined with dot products of its own, which are
            computed in float64. A vector shorter than 1e-154, whose square underflows, may count as zero.

    Source: Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021, arXiv:2006.02924,
    section 3 and algorithm 1.
    """
    core = Core(transport.size)
    index = core.index(transport.rank)
    tensors = _Tensors(counts)
    scratch = np.empty_like(data)

    def combine(into: Array, other: Array) -> None:
        tensors.combine(into, other, tensors.dots(into, other, 0), 0)

    core.fold_in(transport, data, scratch, combine)
    if index is not None:
        start, stop = 0, data.size
        exchanges: list[tuple[int, slice, slice]] = []
        distance = 1
        while distance < core.size:
            partner = core.rank(index ^ distance)
            middle = (start + stop) // 2
            lower, upper = slice(start, middle), slice(middle, stop)
            given, kept = (lower, upper) if index & distance else (upper, lower)
            start, stop = kept.start, kept.stop
            incoming = scratch[: stop - start]
            transport.sendrecv(data[given], partner, incoming, partner)
            # For the sum over the block, a is the vector of the lower ranks on every rank.
            order = [0, 2, 1] if index & distance else [0, 1, 2]
            dots = tensors.dots(data[kept], incoming, start)[order]
            _sum_over_block(transport, core, index, 2 * distance, dots)
            tensors.combine(data[kept], incoming, dots[order], start)
            exchanges.append((partner, given, kept))
            distance *= 2
        for partner, given, kept in reversed(exchanges):
            transport.sendrecv(data[kept], partner, data[given], partner)
    core.fold_out(transport, data)


def check_adasum(dtype: str) -> None:
    """Raise an error unless Adasum is defined for `dtype`, a name of `TensorInfo`: it is for real floating-point dtypes.

    Raises:
        UnsupportedTensorError: `dtype` is not a real floating-point dtype.
    """
    if not dtype.startswith(("float", "bfloat")):
        raise UnsupportedTensorError(
            f"Adasum of {dtype} is not defined: expected float16, bfloat16, float32 or float64. Use Sum or Average."
        )


def _sum_over_block(transport: Transport, core: Core, index: int, size: int, dots: Array) -> None:
    """Sum `dots` over the aligned block of `size` ranks of the core that `index` is in, by recursive doubling.

    Every rank adds the same pairs of numbers, and a + b equals b + a, so all ranks get the same bits.
    """
    incoming = np.empty_like(dots)
    distance = 1
    while distance < size:
        partner = core.rank(index ^ distance)
        transport.sendrecv(dots.reshape(-1), partner, incoming.reshape(-1), partner)
        dots += incoming
        distance *= 2


class _Tensors:
    """The ranges of the tensors in a flat vector, and Adasum's arithmetic on the tensors in any range of the vector."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._bounds = [0, *accumulate(counts)]
        self._wide = np.empty((2, min(_CHUNK, max(counts, default=0))))

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, slice]]:
        """Yield each tensor with elements in ``start … stop``: its number, and its range of the vector within that."""
        tensor = bisect_right(self._bounds, start) - 1
        while start < stop and self._bounds[tensor] < stop:
            first, last = max(self._bounds[tensor], start), min(self._bounds[tensor + 1], stop)
            if first < last:
                yield tensor, slice(first, last)
            tensor += 1

    def dots(self, a: Array, b: Array, start: int) -> Array:
        """Return the dot products of two vectors by tensor. Both hold the same range, which begins at `start`.

        Returns:
            a·b, a·a and b·b, of shape ``(3, tensors)`` and float64. They are zero for tensors without elements in the range.
        """
        dots = np.zeros((3, len(self._bounds) - 1))
        for tensor, part in self._parts(start, start + a.size):
            for first in range(part.start, part.stop, _CHUNK):
                last = min(first + _CHUNK, part.stop)
                wide_a, wide_b = self._wide[0, : last - first], self._wide[1, : last - first]
                wide_a[:] = a[first - start : last - start]
                wide_b[:] = b[first - start : last - start]
                dots[:, tensor] += (wide_a @ wide_b, wide_a @ wide_a, wide_b @ wide_b)
        return dots

    def combine(self, a: Array, b: Array, dots: Array, start: int) -> None:
        """Overwrite `a`, a range of the vector that begins at `start`, with the combination. `b` is overwritten too."""
        products, squares = dots[0], dots[1:]
        projections = np.divide(products, 2 * squares, out=np.zeros_like(squares), where=squares != 0)
        for tensor, part in self._parts(start, start + a.size):
            of_a, of_b = (1 - projections[:, tensor]).tolist()
            mine, other = a[part.start - start : part.stop - start], b[part.start - start : part.stop - start]
            np.multiply(mine, of_a, out=mine)
            np.multiply(other, of_b, out=other)
            mine += other
