"""Collectives of the ranks of one host on tensors in their own memory, by way of memory that all of them see.

Each rank has two slots to show something in, used in turn, and two for results. Between meeting t - 1 and meeting t a rank
fills slot t mod 2, which the others read between t and t + 1; so one meeting per block is enough::

    rank 0   fill A │ read A of 1, fill B │ read B of 1, fill A │ …
    rank 1   fill A │ read A of 0, fill B │ read B of 0, fill A │ …
                 meeting 1            meeting 2             meeting 3

A result slot is filled between t and t + 1 and read between t + 1 and t + 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from hvdlite.algorithms.slices import slices, split
from hvdlite.comm.host import Host
from hvdlite.protocols import Array
from hvdlite.tensors.reduction import Reduction

SLOT_BYTES = 2**19
"""Bytes that a rank shows at a time: with smaller ones the ranks meet too often, larger ones were no faster."""


class HostCollectives:
    """The collectives of one host. Every rank of it calls the same, in the same order, with equal lengths.

    Args:
        host: The ranks.
        slot_bytes: Bytes per slot.
    """

    def __init__(self, host: Host, slot_bytes: int = SLOT_BYTES) -> None:
        self._host = host
        self._slot_bytes = slot_bytes
        memory = host.allocate(4 * slot_bytes)
        pieces = [[piece[n * slot_bytes : (n + 1) * slot_bytes] for piece in memory] for n in range(4)]
        self._shown, self._results = pieces[:2], pieces[2:]
        self._turn = 0
        self._scratch = np.empty(slot_bytes * 8, np.uint8)  # averages of bytes are summed in 64 bits

    def _blocks(self, data: Array) -> Iterator[Array]:
        length = self._slot_bytes // data.itemsize
        return (data[start : start + length] for start in range(0, data.size, length))

    def _meet(self) -> None:
        self._host.meet()
        self._turn ^= 1

    def _slots(self, memory: Sequence[Sequence[Array]], turn: int, dtype: np.dtype[np.generic]) -> list[Array]:
        return [slot.view(dtype) for slot in memory[turn]]

    def allreduce(self, data: Array, how: Reduction) -> None:
        """Reduce `data` over the ranks in place: every rank shows its own, and reduces everybody's.

        The least waiting; and the least copying for two ranks.
        """
        rank = self._host.rank
        for block in self._blocks(data):
            shown = [slot[: block.size] for slot in self._slots(self._shown, self._turn, block.dtype)]
            shown[rank][:] = block
            self._meet()
            shown[rank] = block
            self._reduce(shown, block, how)

    def allreduce_by_slices(
        self, data: Array, how: Reduction, owners: int, between: Callable[[Array], None] | None = None
    ) -> None:
        """Reduce `data` over the ranks in place: each owner reduces its slice of every block, and shows the result.

        Args:
            data: Shape ``(n,)``.
            how: For the dtype of `data`.
            owners: The first so many ranks have a slice.
            between: Called with each slice (in the wide dtype) before it is finished: exchanges it with other hosts.
        """
        rank = self._host.rank
        before: tuple[Array, list[slice], list[Array]] | None = None
        for block in (*self._blocks(data), None):
            turn = self._turn
            if block is not None:
                shares = slices(split(block.size, owners))
                shown = self._slots(self._shown, turn, block.dtype)
                _copy_others(block, shown[rank], shares, rank)
            self._meet()
            if block is not None:
                results = self._slots(self._results, turn, block.dtype)
                if rank < owners:
                    share = shares[rank]
                    sources = [slot[share] for slot in shown]
                    sources[rank] = block[share]
                    self._reduce(sources, block[share], how, between)
                    results[rank][share] = block[share]
            if before is not None:
                earlier, their_shares, their_results = before
                for owner, share in enumerate(their_shares):
                    if owner != rank:
                        earlier[share] = their_results[owner][share]
            before = None if block is None else (block, shares, results)

    def _reduce(
        self, sources: list[Array], into: Array, how: Reduction, between: Callable[[Array], None] | None = None
    ) -> None:
        direct = how.exact and len(sources) <= 2
        wide = into if direct else self._scratch.view(how.wide_dtype)[: into.size]
        how.combine(sources, wide)
        if between is not None:
            between(wide)
        if how.finishes:
            how.finish(wide)
        if not direct:
            how.narrow(wide, into)

    def reduce_scatter(self, data: Array, out: Array, counts: Sequence[int], how: Reduction) -> None:
        """Reduce `data` over the ranks; rank r keeps slice r, of ``counts[r]`` elements, in `out`. `data` is only read."""
        host = self._host
        length = max(1, self._slot_bytes // data.itemsize // host.size)
        starts = [piece.start for piece in slices(counts)]
        for begin in range(0, max(counts), length):
            turn = self._turn
            shown = self._slots(self._shown, turn, data.dtype)
            sizes = [max(0, min(length, count - begin)) for count in counts]
            for owner, size in enumerate(sizes):
                if owner != host.rank:
                    piece = data[starts[owner] + begin :][:size]
                    shown[host.rank][owner * length : owner * length + size] = piece
            self._meet()
            size = sizes[host.rank]
            sources = [slot[host.rank * length :][:size] for slot in shown]
            sources[host.rank] = data[starts[host.rank] + begin :][:size]
            how.combine(sources, out[begin : begin + size])

    def allgather(self, data: Array, out: Array, counts: Sequence[int]) -> None:
        """Concatenate the ranks' `data` (``counts[r]`` elements from rank r) in `out`."""
        pieces = [out[piece] for piece in slices(counts)]
        length = self._slot_bytes // data.itemsize
        for begin, end in pairwise([*range(0, max(counts), length), max(counts)]):
            shown = self._slots(self._shown, self._turn, data.dtype)
            mine = data[begin:end]
            shown[self._host.rank][: mine.size] = mine
            self._meet()
            for rank, piece in enumerate(pieces):
                there = piece[begin:end]
                there[:] = mine if rank == self._host.rank else shown[rank][: there.size]

    def broadcast(self, data: Array, root: int) -> None:
        """Overwrite `data` with that of rank `root`."""
        for block in self._blocks(data):
            shown = self._slots(self._shown, self._turn, block.dtype)[root][: block.size]
            if self._host.rank == root:
                shown[:] = block
            self._meet()
            if self._host.rank != root:
                block[:] = shown


def _copy_others(block: Array, into: Array, shares: Sequence[slice], rank: int) -> None:
    """Copy what is not this rank's share, in one piece or two."""
    own = shares[rank] if rank < len(shares) else slice(0, 0)
    into[: own.start] = block[: own.start]
    into[own.stop : block.size] = block[own.stop :]
