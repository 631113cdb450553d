"""Collectives of the ranks of one host. The tensors lie in each rank's own memory and are copied through shared slots.

Each rank has two slots for its input and two slots for results, and uses them in turn. A rank fills slot t mod 2 between
meeting t - 1 and meeting t. The others read that slot between t and t + 1. So one meeting per block is enough::

    rank 0   fill A │ read A of 1, fill B │ read B of 1, fill A │ …
    rank 1   fill A │ read A of 0, fill B │ read B of 0, fill A │ …
                 meeting 1            meeting 2             meeting 3

A rank fills a result slot between t and t + 1. The others read it between t + 1 and t + 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from hvdlite.algorithms.slices import check_counts, slices, split
from hvdlite.comm.between_hosts import reduce_between_hosts
from hvdlite.comm.host import Host
from hvdlite.protocols import Array, Collectives, ReduceOp
from hvdlite.tensors.reduction import Reduction, average_long

SLOT_BYTES = 2**19
"""The size of a slot in bytes. With smaller slots the ranks meet too often; larger slots were no faster."""


class HostCollectives:
    """The collectives of one host. Every rank of the host makes the same calls, in the same order, with equal lengths.

    Args:
        host: The ranks of the host.
        slot_bytes: The size of a slot in bytes.
    """

    def __init__(self, host: Host, slot_bytes: int = SLOT_BYTES) -> None:
        self._host = host
        self._slot_bytes = slot_bytes
        memory = host.allocate(4 * slot_bytes)
        pieces = [[piece[n * slot_bytes : (n + 1) * slot_bytes] for piece in memory] for n in range(4)]
        self._shown, self._results = pieces[:2], pieces[2:]
        self._turn = 0
        self._scratch = np.empty(slot_bytes * 8, np.uint8)  # a byte is averaged in 64 bits

    def _blocks(self, data: Array) -> Iterator[Array]:
        length = self._slot_bytes // data.itemsize
        return (data[start : start + length] for start in range(0, data.size, length))

    def _meet(self) -> None:
        self._host.meet()
        self._turn ^= 1

    def _slots(self, memory: Sequence[Sequence[Array]], turn: int, dtype: np.dtype[np.generic]) -> list[Array]:
        return [slot.view(dtype) for slot in memory[turn]]

    def allreduce(self, data: Array, how: Reduction) -> None:
        """Reduce `data` over the ranks in place. Every rank copies its data to a slot and reduces the data of all ranks.

        This way has the fewest meetings, and for two ranks the fewest copies.

        Args:
            data: An array of shape ``(n,)``.
            how: The reduction, for the dtype of `data`.
        """
        rank = self._host.rank
        for block in self._blocks(data):
            shown = [slot[: block.size] for slot in self._slots(self._shown, self._turn, block.dtype)]
            shown[rank][:] = block
            self._meet()
            shown[rank] = block
            self._reduce(shown, block, how, how.can_be_direct(shown))

    def allreduce_by_slices(self, data: Array, how: Reduction, owners: int, between: Collectives | None = None) -> None:
        """Reduce `data` over the ranks in place. Each owner reduces its slice of every block and puts the result in a slot.

        Args:
            data: An array of shape ``(n,)``.
            how: The reduction, for the dtype of `data`.
            owners: The number of owners: the first `owners` ranks of the host own a slice.
            between: The collectives of the ranks of all hosts that own the same slice; None if there is one host, or this rank
                owns no slice.
        """
        rank = self._host.rank
        before: tuple[Array, list[slice], list[Array]] | None = None
        for block in (*self._blocks(data), None):
            turn = self._turn
            if block is not None:
                owned = slices(split(block.size, owners))
                shown = self._slots(self._shown, turn, block.dtype)
                _copy_others(block, shown[rank], owned, rank)
            self._meet()
            if block is not None:
                results = self._slots(self._results, turn, block.dtype)
                if rank < owners:
                    part = owned[rank]
                    sources = [slot[part] for slot in shown]
                    sources[rank] = block[part]
                    self._reduce(sources, block[part], how, how.can_be_direct(sources), between)
                    results[rank][part] = block[part]
            if before is not None:
                earlier, their_slices, their_results = before
                for owner, part in enumerate(their_slices):
                    if owner != rank:
                        earlier[part] = their_results[owner][part]
            before = None if block is None else (block, owned, results)

    def _reduce(
        self,
        sources: list[Array],
        into: Array,
        how: Reduction,
        direct: bool,
        between: Collectives | None = None,
    ) -> None:
        wide = into if direct else self._scratch.view(how.wide_dtype)[: into.size]
        if between is None:
            how.complete(sources, wide, into)
        elif how.is_long_average:
            average_long(how, sources, into, partial(_total, between))
        else:
            how.partial(sources, wide)
            reduce_between_hosts(between, how, wide, into, how.conclude)

    def reduce_scatter(self, data: Array, out: Array, counts: Sequence[int], how: Reduction) -> None:
        """Reduce `data` over the ranks, and put slice r (``counts[r]`` elements) in `out` on rank r.

        The function only reads `data`, which must not overlap `out`.
        """
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
            self._reduce(sources, out[begin : begin + size], how, direct=how.exact)

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

    def alltoall(self, data: Array, send_counts: Sequence[int], out: Array, recv_counts: Sequence[int]) -> None:
        """Send slice r of `data` to rank r, and put the slice that comes from rank r in slice r of `out`.

        The ranks show each other their counts beside the first block, so a small exchange takes one meeting.

        Raises:
            MismatchError: A rank sends another number of elements than its receiver expects. All ranks raise it.
        """
        host = self._host
        head = -(-2 * host.size * 8 // data.itemsize) * data.itemsize  # the counts, before the lanes of the first block
        sends = [data[piece] for piece in slices(send_counts)]
        receives = [out[piece] for piece in slices(recv_counts)]
        begin, most, counts = 0, 1, np.array([send_counts, recv_counts], np.int64)
        while begin < most:
            shown = [slot[head:].view(data.dtype) for slot in self._shown[self._turn]]
            told = self._slots(self._shown, self._turn, counts.dtype)
            length = max(1, shown[0].size // host.size)
            for rank, piece in enumerate(sends):
                block = piece[begin : begin + length]
                if rank != host.rank:
                    shown[host.rank][rank * length :][: block.size] = block
            if not begin:
                told[host.rank][: counts.size] = counts.ravel()
            self._meet()
            if not begin:
                most = check_counts(np.stack([slot[: counts.size].reshape(counts.shape) for slot in told]))
                receives[host.rank][:] = sends[host.rank]
            for rank, piece in enumerate(receives):
                block = piece[begin : begin + length]
                if rank != host.rank:
                    block[:] = shown[rank][host.rank * length :][: block.size]
            begin += length

    def broadcast(self, data: Array, root: int) -> None:
        """Overwrite `data` with the data of rank `root`."""
        for block in self._blocks(data):
            shown = self._slots(self._shown, self._turn, block.dtype)[root][: block.size]
            if self._host.rank == root:
                shown[:] = block
            self._meet()
            if self._host.rank != root:
                block[:] = shown


def _total(between: Collectives, part: Array) -> Array:
    between.allreduce(part, ReduceOp.SUM)
    return part


def _copy_others(block: Array, into: Array, owned: Sequence[slice], rank: int) -> None:
    """Copy the elements of `block` that this rank does not own, in one piece or two."""
    own = owned[rank] if rank < len(owned) else slice(0, 0)
    into[: own.start] = block[: own.start]
    into[own.stop : block.size] = block[own.stop :]
