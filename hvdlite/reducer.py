"""Gradients in flat memory: the hot path. Every rank has the same layout, so nothing is negotiated.

Gradients lie in memory that the other ranks of the host can read. Each rank answers for a part of it: it sums that part of
everybody's memory, a chunk at a time so that the chunk stays in its cache, divides, and writes it where it is needed::

    memory of rank 0   ├── part 0 ──┼── part 1 ──┤      rank 0 reads both parts 0, writes both
    memory of rank 1   ├── part 0 ──┼── part 1 ──┤      rank 1 reads both parts 1, writes both

On several hosts, what a host has summed of a part is then summed over the hosts by the ranks of equal number (see
`hvdlite.comm.layers`). What may differ between ranks is told first, in a short header: which tensors have a gradient, and
how many samples they are the mean of. The weighted sum of the gradients divided by the sum of the weights is the gradient
of the joined batch whatever the shares of the ranks, nothing included.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdlite.arithmetic import Arithmetic, arithmetic
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.layout import Block, Piece, lay_out, pieces
from hvdlite.protocols import Array, ReduceOp, TensorInfo
from hvdlite.watch import Watch

CHUNK_BYTES = 2**17
"""What is summed at a time: as many bytes of each rank as stay in a core's cache."""

_WEIGHT, _ODDITY, _EXTRA = -2, -1, 2
"""The end of a header: the weight, and how far it is from 1."""


class _Chunk(NamedTuple):
    """The same stretch of the memory of each rank of the host."""

    sources: tuple[Array, ...]
    own: Array
    others: tuple[Array, ...]


class _Memory:
    """One block of the layout, on all ranks of the host."""

    def __init__(self, block: Block, everybody: Sequence[Array]) -> None:
        self.block = block
        self.kernel: Arithmetic = arithmetic(block.dtype, ReduceOp.SUM)
        self.everybody = everybody


class Reducer:
    """The gradients of one model on one rank. All ranks make one, with equal arguments.

    Args:
        infos: Dtype and shape of each tensor.
        collectives: For this reducer alone.
        op: SUM or AVERAGE.
        bucket_bytes: Bytes that are exchanged between hosts at a time.
        ranks: The world ranks that take part, for messages.
        watch: Is told while an exchange lasts.

    Raises:
        ArgumentError: Another `op`.
        UnsupportedTensorError: A dtype that has no gradients.
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        collectives: HierarchicalCollectives,
        op: ReduceOp,
        bucket_bytes: int,
        ranks: Sequence[int],
        watch: Watch,
    ) -> None:
        if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise ArgumentError(f"op={op!r}: gradients are combined by Average or Sum.")
        self._collectives = collectives
        self._layers = collectives.layers
        self._host = collectives.layers.host
        self._op = op
        self._bucket_bytes = bucket_bytes
        self._ranks = ranks
        self._watch = watch
        self._steps = 0
        self._factors: list[float] | None = None
        self._divisor = 1.0
        self._headers = [header.view(np.float64) for header in self._host.allocate(8 * (len(infos) + _EXTRA))]
        self._memories = [_Memory(block, self._allocate(block)) for block in self._lay_out(infos)]
        self._memory_of: list[Array] = [np.empty(0)] * len(infos)
        for memory in self._memories:
            for index, span in memory.block.spans.items():
                self._memory_of[index] = memory.everybody[self._host.rank][span.start : span.stop]
        self._chunks = [(memory.kernel, self._chunks_of(memory)) for memory in self._memories]
        sizes = (kernel.wide.itemsize * c.own.size for kernel, chunks in self._chunks for c in chunks)
        self._scratch = np.empty((2, max(sizes, default=0)), np.uint8)

    def _lay_out(self, infos: Sequence[TensorInfo]) -> list[Block]:
        return lay_out(infos, self._layers.owners)

    def _allocate(self, block: Block) -> list[Array]:
        dtype = arithmetic(block.dtype, ReduceOp.SUM).storage
        return [piece.view(dtype) for piece in self._host.allocate(block.length * dtype.itemsize)]

    def _chunks_of(self, memory: _Memory) -> list[_Chunk]:
        """This rank's part, cut."""
        if self._host.rank >= self._layers.owners:
            return []
        rank = self._host.rank
        begin, end = self._part_of(memory.block, rank)
        chunk_bytes = CHUNK_BYTES if self._layers.cross is None else self._bucket_bytes
        length = max(1, chunk_bytes // memory.kernel.storage.itemsize)
        chunks = []
        for start, stop in itertools.pairwise([*range(begin, end, length), end]):
            views = [array[start:stop] for array in memory.everybody]
            chunks.append(_Chunk(tuple(views), views[rank], tuple(views[:rank] + views[rank + 1 :])))
        return chunks

    def _part_of(self, block: Block, owner: int) -> tuple[int, int]:
        return block.bounds[owner], block.bounds[owner + 1]

    def memory_of(self, index: int) -> Array:
        """The flat memory that holds the gradient of tensor `index`: write it before, read it after.

        Of the tensor's dtype; bfloat16 as its bits in uint16.
        """
        return self._memory_of[index]

    def close(self) -> None:
        """Release the memory and the channels. Every rank does this; the reducer is not used again."""
        self._memories, self._memory_of, self._chunks = [], [], []
        self._collectives.close()

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds for the exchange."""
        own = sum(memory.everybody[0].nbytes for memory in self._memories)
        return int(own + self._headers[0].nbytes + self._scratch.nbytes)

    def exchange(self, used: Sequence[bool], weight: float = 1.0) -> list[bool]:
        """Combine the gradients over the ranks, in place.

        Args:
            used: For each tensor, whether this rank has a gradient of it in `memory_of`.
            weight: Share of this rank in an average: the number of samples that its gradients are the mean of.

        Returns:
            For each tensor, whether any rank has a gradient of it; if none has, its memory holds zeros.

        Raises:
            HvdliteError: The weights of all ranks are 0, so there is no average. Raised on all of them.
        """
        self._steps += 1
        if self._collectives.size == 1:
            return self._alone(used, weight)
        watched = self._watch.exchanging(lambda: f"gradient exchange {self._steps}", self._ranks)
        with watched, np.errstate(all="ignore"):
            anywhere = self._tell(used, weight)
            if self._divisor > 0 or not any(anywhere):
                self._reduce()
            self._host.meet()
        self._check_divisor(anywhere)
        return anywhere

    def _alone(self, used: Sequence[bool], weight: float) -> list[bool]:
        for index, there in enumerate(used):
            if not there:
                self._memory_of[index][:] = 0
        self._divisor = weight
        self._check_divisor(used)
        return list(used)

    def _check_divisor(self, anywhere: Sequence[bool]) -> None:
        if self._op is ReduceOp.AVERAGE and any(anywhere) and self._divisor <= 0:
            raise HvdliteError(
                "the weights of all ranks add up to 0, so their gradients have no average: skip this step on all ranks."
            )

    def _tell(self, used: Sequence[bool], weight: float) -> list[bool]:
        """Exchange headers. Afterwards the gradients of all ranks may be read."""
        mine = self._headers[self._host.rank]
        mine[:_WEIGHT] = used
        mine[_WEIGHT] = weight
        mine[_ODDITY] = abs(weight - 1.0)
        for index, there in enumerate(used):
            if not there:
                self._memory_of[index][:] = 0
        self._host.meet()
        if self._layers.hosts > 1:
            total = mine.copy()
            self._collectives.flat.allreduce(total, ReduceOp.SUM)
        else:
            total = np.add.reduce(self._headers)
        plain = total[_ODDITY] == 0.0
        self._factors = None if plain else [float(header[_WEIGHT]) for header in self._headers]
        self._divisor = float(total[_WEIGHT])
        anywhere: list[bool] = (total[:_WEIGHT] > 0).tolist()
        return anywhere

    def _reduce(self) -> None:
        cross = self._layers.cross
        for kernel, chunks in self._chunks:
            for chunk in chunks:
                wide = self._sum(kernel, chunk)
                if cross is not None:
                    cross.allreduce(wide, ReduceOp.SUM)
                self._divide(wide)
                if wide is not chunk.own:
                    kernel.narrow(wide, chunk.own)
                for other in chunk.others:
                    np.copyto(other, chunk.own)

    def _sum(self, kernel: Arithmetic, chunk: _Chunk) -> Array:
        """The weighted sum of a chunk over the ranks of the host: in this rank's own memory if that can be, or in scratch."""
        if self._factors is None:
            direct = kernel.exact and len(chunk.sources) <= 2
            wide = chunk.own if direct else self._scratch[0].view(kernel.wide)[: chunk.own.size]
            kernel.combine(chunk.sources, wide)
            return wide
        wide, term = (row.view(kernel.wide)[: chunk.own.size] for row in self._scratch)
        wide[:] = 0
        for source, factor in zip(chunk.sources, self._factors, strict=True):
            if factor:  # whoever has no samples may hold anything
                kernel.widen(source, term)
                np.multiply(term, factor, out=term)
                np.add(wide, term, out=wide)
        return wide

    def _divide(self, wide: Array) -> None:
        if self._op is ReduceOp.AVERAGE:
            np.divide(wide, self._divisor, out=wide)


class ShardedReducer(Reducer):
    """Gradients of which each rank gets only its own share, and the parameters of the host in one shared memory.

    Every rank of every host answers for a share; the shares of the ranks of equal number lie side by side in the part of that
    number, so that hosts exchange a part by one reduce-scatter of gradients and one allgather of parameters::

        part 0: ├ host 0, rank 0 ┼ host 1, rank 0 ┤ part 1: ├ host 0, rank 1 ┼ host 1, rank 1 ┤

    Args:
        infos, collectives, op, bucket_bytes, ranks, watch: As for `Reducer`.
        whole: Never cut a tensor between ranks.

    Attributes:
        pieces: What this rank answers for.
        own: For each piece, where this rank's gradient of it is before an exchange and the combined one after: a part of
            `memory_of` at first. On one host it may be replaced by any array of that length and dtype, to spare a copy.
        one_host: There is one host only.
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        collectives: HierarchicalCollectives,
        op: ReduceOp,
        bucket_bytes: int,
        ranks: Sequence[int],
        watch: Watch,
        whole: bool,
    ) -> None:
        self._whole = whole
        super().__init__(infos, collectives, op, bucket_bytes, ranks, watch)
        self.one_host = self._layers.hosts == 1
        place = self._layers.places[collectives.rank]
        self._share: int | None = None
        if place.number < self._layers.owners:
            among_hosts = 0 if self._layers.cross is None else self._layers.cross.rank
            self._share = place.number * self._layers.hosts + among_hosts
        self.pieces: list[Piece] = []
        self.own: list[Array] = []
        self._cuts: list[tuple[Arithmetic, list[tuple[slice, list[Array], list[Array]]]]] = []
        self._place_pieces()
        self._parameters = [self._allocate_together(memory.block) for memory in self._memories]
        self._parameters_of: list[Array] = [np.empty(0)] * len(infos)
        for memory, parameters in zip(self._memories, self._parameters, strict=True):
            for index, span in memory.block.spans.items():
                self._parameters_of[index] = parameters[span.start : span.stop]

    def _lay_out(self, infos: Sequence[TensorInfo]) -> list[Block]:
        return lay_out(infos, self._layers.owners * self._layers.hosts, self._whole)

    def _part_of(self, block: Block, owner: int) -> tuple[int, int]:
        hosts = self._layers.hosts
        return block.bounds[owner * hosts], block.bounds[(owner + 1) * hosts]

    def _allocate_together(self, block: Block) -> Array:
        dtype = arithmetic(block.dtype, ReduceOp.SUM).storage
        return self._host.allocate_together(block.length * dtype.itemsize).view(dtype)

    def parameters_of(self, index: int) -> Array:
        """The flat memory of parameter `index`, shared by all ranks of the host. Of the dtype of `memory_of`."""
        return self._parameters_of[index]

    def _place_pieces(self) -> None:
        """Find this rank's pieces, and cut the memory of the other ranks of the host to chunks of them."""
        if self._share is None:
            return
        rank = self._host.rank
        for memory in self._memories:
            length = CHUNK_BYTES // memory.kernel.storage.itemsize
            for piece in pieces(memory.block, self._share):
                first = memory.block.spans[piece.tensor].start
                views = [array[first + piece.start : first + piece.stop] for array in memory.everybody]
                cuts = []
                for start, stop in itertools.pairwise([*range(0, views[rank].size, length), views[rank].size]):
                    parts = [view[start:stop] for view in views]
                    cuts.append((slice(start, stop), parts[:rank], parts[rank + 1 :]))
                self.pieces.append(piece)
                self.own.append(views[rank])
                self._cuts.append((memory.kernel, cuts))

    def meet(self) -> None:
        """Return when all ranks of the host are here: what they wrote to parameters is there."""
        with self._watch.exchanging(lambda: f"the end of step {self._steps}", self._ranks):
            self._host.meet()

    def publish(self) -> None:
        """Every rank has changed its share of the parameters: bring them to all hosts. Afterwards all may read all."""
        cross = self._layers.cross
        with self._watch.exchanging(lambda: f"the parameters of step {self._steps}", self._ranks):
            if cross is not None and self._share is not None:
                for memory, parameters in zip(self._memories, self._parameters, strict=True):
                    bounds = memory.block.bounds
                    own = parameters[bounds[self._share] : bounds[self._share + 1]].copy()
                    begin, end = self._part_of(memory.block, self._host.rank)
                    cross.allgather(own, parameters[begin:end], self._counts(memory.block))
            self._host.meet()

    def _counts(self, block: Block) -> list[int]:
        first = self._host.rank * self._layers.hosts
        return [block.bounds[n + 1] - block.bounds[n] for n in range(first, first + self._layers.hosts)]

    def _reduce(self) -> None:
        if self._layers.cross is not None:
            for memory, (kernel, chunks) in zip(self._memories, self._chunks, strict=True):
                self._reduce_between_hosts(memory, kernel, chunks)
            return
        for own, (kernel, cuts) in zip(self.own, self._cuts, strict=True):
            for part, before, after in cuts:
                mine = own[part]
                wide = self._sum(kernel, _Chunk((*before, mine, *after), mine, ()))
                self._divide(wide)
                if wide is not mine:
                    kernel.narrow(wide, mine)

    def _reduce_between_hosts(self, memory: _Memory, kernel: Arithmetic, chunks: Sequence[_Chunk]) -> None:
        assert self._layers.cross is not None
        assert self._share is not None
        block = memory.block
        begin, end = self._part_of(block, self._host.rank)
        part = np.empty(end - begin, kernel.wide)
        start = 0
        for chunk in chunks:
            part[start : start + chunk.own.size] = self._sum(kernel, chunk)
            start += chunk.own.size
        lo, hi = block.bounds[self._share], block.bounds[self._share + 1]
        share = np.empty(hi - lo, kernel.wide)
        self._layers.cross.reduce_scatter(part, share, self._counts(block), ReduceOp.SUM)
        self._divide(share)
        kernel.narrow(share, memory.everybody[self._host.rank][lo:hi])
