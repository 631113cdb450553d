"""`WeightedSum`: the weighted sum of one chunk over the ranks of a host, and its division.

An average fits in its dtype where the sum may not. NumPy says so after each sum, at no cost. Then the chunk is summed once
more, of values that are scaled by a power of two. Nobody sees what a sum becomes between hosts, so an average that travels is
always scaled: where the sum of the weights is a power of two, that is the division; else it is one multiplication more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np

from hvdlite.protocols import Array
from hvdlite.tensors.reduction import Overflow, Reduction, fitting_factor


class WeightedSum:
    """Sums chunks, with scratch memory for sums that cannot be computed in place.

    Args:
        chunk_bytes: The largest number of bytes of a chunk, in the dtype in which it is summed.
        average: Whether sums are divided by the sum of the weights.

    Attributes:
        factors: The weight of each rank of the host; None if all weights are 1.
        divisor: The sum of the weights of all ranks.
    """

    def __init__(self, chunk_bytes: int, average: bool) -> None:
        self._average = average
        self._scratch = np.empty((2, -(-chunk_bytes // 16) * 16), np.uint8)
        self._overflow = Overflow()
        self._scaled = 1.0
        """The power of two by which the last sum was multiplied."""
        self.factors: list[float] | None = None
        self.divisor = 1.0

    @property
    def nbytes(self) -> int:
        """The bytes of scratch memory that this rank holds."""
        return self._scratch.nbytes

    def watching(self) -> AbstractContextManager[object]:
        """Return a context manager in which sums that overflow are noticed. `sum` is called in it."""
        return np.errstate(over="call", call=self._overflow)

    def sum(self, how: Reduction, sources: Sequence[Array], result: Array, in_place: bool, travels: bool) -> Array:
        """Sum a chunk over the ranks of the host, with weights.

        Args:
            how: How values are added.
            sources: The chunk of each rank, in the order of `factors`.
            result: Where the sum is wanted.
            in_place: Whether `result` is one of the sources.
            travels: Whether the ranks of other hosts add their sums before `divide`.

        Returns:
            The sum: `result` itself if it could be summed there, or scratch memory of the wider dtype. If an average is wanted,
            it may be scaled; `divide` knows by how much.
        """
        self._overflow.seen, self._scaled = False, 1.0
        if self.factors is None:
            # An average needs the sources again if its sum does not fit.
            direct = how.exact and not (in_place and (self._average or len(sources) > 2))
            wide: Array = result if direct else self._scratch[0].view(how.wide_dtype)[: result.size]
            how.combine(sources, wide)
        else:
            wide = self._weighed(how, sources, self.factors, result.size)
        if not self._average or (shift := fitting_factor(self.divisor)) == 1.0:
            return wide
        if self._overflow.seen or how.may_have_overflowed(wide):
            factors = [1.0] * len(sources) if self.factors is None else self.factors
            wide = self._weighed(how, sources, [factor * shift for factor in factors], result.size)
            self._scaled = shift
        elif travels:
            target = result if how.exact else wide
            np.multiply(wide, shift, out=target)
            wide, self._scaled = target, shift
        return wide

    def _weighed(self, how: Reduction, sources: Sequence[Array], factors: Sequence[float], size: int) -> Array:
        wide: Array = self._scratch[0].view(how.wide_dtype)[:size]
        term = self._scratch[1].view(how.wide_dtype)[:size]
        wide[:] = 0
        for source, factor in zip(sources, factors, strict=True):
            if factor:  # the gradients of a rank without samples may be anything
                how.combine((source,), term)
                np.multiply(term, factor, out=term)
                np.add(wide, term, out=wide)
        return wide

    def divide(self, wide: Array) -> None:
        """Divide a sum over all ranks in place, if an average is wanted."""
        self._divide(wide, wide)

    def finish(self, how: Reduction, wide: Array, result: Array) -> None:
        """Divide a sum over all ranks if an average is wanted, and put it into `result`."""
        target = result if how.exact else wide
        self._divide(wide, target)
        if target is not result:
            how.narrow(target, result)

    def _divide(self, wide: Array, out: Array) -> None:
        divisor = self.divisor * self._scaled if self._average else 1.0
        if divisor != 1.0:
            np.divide(wide, divisor, out=out)
        elif wide is not out:
            np.copyto(out, wide)
