"""Folds any number of ranks to a power of two, for algorithms that pair ranks by the bits of their number."""

from __future__ import annotations

from hvdlite.protocols import Array, Combine, Transport


class Core:
    """The core: the largest power of two of ranks, which make an allreduce on behalf of all.

    Of P = 2ᵏ + e ranks the first 2e form pairs. The odd rank of a pair sends its data to the even
    one beforehand and receives the result afterwards, so it does not take part in between::

        P = 6, k = 2, e = 2     rank        0 ←─ 1    2 ←─ 3    4    5
                                in the core 0         1         2    3

    The pairs are neighbours, so the ranks stay in order, and most pairs are on one host.

    Cost for n bytes: if P is not a power of two, the fold costs α + nβ + nγ in and α + nβ out.

    Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
    MPICH", Int. J. High Perform. Comput. Appl. 19(1), 2005, section 4.5.
    """

    def __init__(self, ranks: int) -> None:
        self.size = 1 << (ranks.bit_length() - 1)
        """The number of ranks in the core."""
        self.extra = ranks - self.size
        """The number of ranks that are not in the core."""

    def index(self, rank: int) -> int | None:
        """Return the position of `rank` in the core, or None if it is not in the core."""
        if rank >= 2 * self.extra:
            return rank - self.extra
        return None if rank % 2 else rank // 2

    def rank(self, index: int) -> int:
        """Return the rank at position `index` of the core."""
        return 2 * index if index < self.extra else index + self.extra

    def fold_in(self, transport: Transport, data: Array, scratch: Array, combine: Combine) -> None:
        """Reduce the data of each pair into its even rank's `data`. `scratch` has the shape and dtype of `data`."""
        rank = transport.rank
        if rank < 2 * self.extra:
            if rank % 2:
                transport.send(data, rank - 1)
            else:
                transport.recv(scratch, rank + 1)
                combine(data, scratch)

    def fold_out(self, transport: Transport, data: Array) -> None:
        """Copy the `data` of the even rank of each pair to the odd rank."""
        rank = transport.rank
        if rank < 2 * self.extra:
            if rank % 2:
                transport.recv(data, rank - 1)
            else:
                transport.send(data, rank + 1)
