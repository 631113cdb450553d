"""`WeightedSum`: the weighted sum of one chunk over the ranks of a host, and its division."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.protocols import Array
from hvdlite.tensors.reduction import Reduction


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
        self.factors: list[float] | None = None
        self.divisor = 1.0

    @property
    def nbytes(self) -> int:
        """The bytes of scratch memory that this rank holds."""
        return self._scratch.nbytes

    def sum(self, how: Reduction, sources: Sequence[Array], result: Array, in_place: bool) -> Array:
        """Sum a chunk over the ranks of the host, with weights.

        Args:
            how: How values are added.
            sources: The chunk of each rank, in the order of `factors`.
            result: Where the sum is wanted.
            in_place: Whether `result` is one of the sources.

        Returns:
            The sum: `result` itself if it could be summed there, or scratch memory of the wider dtype.
        """
        if self.factors is None:
            direct = how.exact and not (in_place and len(sources) > 2)
            into: Array = result if direct else self._scratch[0].view(how.wide_dtype)[: result.size]
            how.combine(sources, into)
            return into
        wide: Array = self._scratch[0].view(how.wide_dtype)[: result.size]
        term = self._scratch[1].view(how.wide_dtype)[: result.size]
        wide[:] = 0
        for source, factor in zip(sources, self.factors, strict=True):
            if factor:  # the gradients of a rank without samples may be anything
                how.combine((source,), term)
                np.multiply(term, factor, out=term)
                np.add(wide, term, out=wide)
        return wide

    def divide(self, wide: Array) -> None:
        """Divide a sum over all ranks in place, if an average is wanted."""
        if self._average:
            np.divide(wide, self.divisor, out=wide)
