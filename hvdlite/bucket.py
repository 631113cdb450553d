"""Some of a model's gradients in flat memory, and their sum over the ranks.

Gradients lie in memory that the other ranks of the host can read. Each rank answers for a part of it: it sums that part of
everybody's memory, a chunk at a time so that the chunk stays in its cache, divides, and writes it where it is needed::

    memory of rank 0   ├── part 0 ──┼── part 1 ──┤      rank 0 reads both parts 0, writes both
    memory of rank 1   ├── part 0 ──┼── part 1 ──┤      rank 1 reads both parts 1, writes both

Nobody else reads a rank's own part of its own gradients. On one host such a part of a large tensor may therefore be summed
where the framework left it (`Bucket.place`), which spares the copy. On several hosts, what a host has summed of a part is
then summed over the hosts by the ranks of equal number (see `hvdlite.comm.layers`).

What may differ between ranks is told first, in a short header (`hvdlite.header`): which tensors have a gradient, and how many
samples they are the mean of. The weighted sum of the gradients divided by the sum of the weights is the gradient of the joined
batch whatever the shares of the ranks, nothing included.

Results lie where the gradients do; or apart from them, so that an exchange can be repeated; or in memory that is lent to a
framework, which reads it without a copy for as long as it likes (`Room`). All ranks of a host read the same lent memory, so
each writes its part once. There are a few such rooms. The header tells which of them somebody on this rank still looks at, and
all ranks take the first that is free everywhere.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hvdlite.arithmetic import Arithmetic, arithmetic, nbytes_of
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.header import WORDS, Exchanged, Said, read, words
from hvdlite.layout import Block, lay_out
from hvdlite.protocols import Array, ReduceOp, TensorInfo
from hvdlite.timeline import BucketRecord

LARGE_BYTES = 2**14
"""A smaller tensor is sooner copied than looked at: those lie side by side, and are summed together."""


class Memory:
    """One block of the layout, on all ranks of the host.

    Attributes:
        gradients: Of each rank: what it contributes.
        results: Of each rank: where it gets the result. The same arrays, or others.
    """

    def __init__(self, block: Block, kernel: Arithmetic, gradients: list[Array], results: list[Array]) -> None:
        self.block = block
        self.kernel = kernel
        self.gradients = gradients
        self.results = results


class _Cut(NamedTuple):
    """A chunk of a stretch."""

    part: slice
    before: tuple[Array, ...]
    """The gradients of the ranks before this one on the host."""
    after: tuple[Array, ...]
    others: tuple[Array, ...]
    """The results of the other ranks of the host."""


class _Chunk(NamedTuple):
    """A chunk, with what this rank contributes where it is now."""

    sources: tuple[Array, ...]
    result: Array
    others: tuple[Array, ...]


class Stretch:
    """Neighbouring elements that this rank answers for: of one large tensor, or of any number of small ones.

    Args:
        memory: The block that they lie in.
        start, stop: Where.
        rank: This rank's number on the host.
        length: Of a chunk, in elements.
        share: Whether the other ranks get the result.
    """

    def __init__(self, memory: Memory, start: int, stop: int, rank: int, length: int, share: bool) -> None:
        self.kernel = memory.kernel
        views = [array[start:stop] for array in memory.gradients]
        in_place = memory.results is memory.gradients
        results = views if in_place else [array[start:stop] for array in memory.results]
        self._home = views[rank], results[rank]
        self.gradient, self.result = self._home
        self.cuts = []
        for lo, hi in itertools.pairwise([*range(0, stop - start, length), stop - start]):
            parts = [view[lo:hi] for view in views]
            others = [result[lo:hi] for result in results[:rank] + results[rank + 1 :]] if share else []
            self.cuts.append(_Cut(slice(lo, hi), tuple(parts[:rank]), tuple(parts[rank + 1 :]), tuple(others)))
        self._home_chunks = self._cut(*self._home)

    @property
    def in_place(self) -> bool:
        """The result overwrites this rank's gradient."""
        return self.gradient is self.result

    def chunks(self) -> list[_Chunk]:
        """What to sum, and where to put it."""
        gradient = self.gradient
        return self._home_chunks if gradient is self._home[0] else self._cut(gradient, self.result)

    def _cut(self, gradient: Array, result: Array) -> list[_Chunk]:
        return [
            _Chunk((*cut.before, gradient[cut.part], *cut.after), result[cut.part], cut.others) for cut in self.cuts
        ]

    def place(self, gradient: Array | None, keep: bool) -> None:
        """Take this rank's gradient from another array, and leave the result there too if `keep`; or from home again."""
        home, result = self._home
        # At once, never by way of home: a thread may be reading what is placed here once more (see `hvdlite.overlap`).
        self.gradient = home if gradient is None else gradient
        self.result = result if gradient is None or not keep else gradient


class Room:
    """A place for the results of a bucket.

    Args:
        memories: Of each block.
        stretches: What this rank answers for, with results here.
        lent: Arrays of results are views of these; empty if results are not lent. Whoever holds such a view holds a reference
            to the array behind it, as NumPy leads the view of a view back to that.
    """

    def __init__(self, memories: list[Memory], stretches: list[Stretch], rank: int, lent: Sequence[Array] = ()) -> None:
        self.memories = memories
        self.stretches = stretches
        self.result_of = {
            index: memory.results[rank][span.start : span.stop]
            for memory in memories
            for index, span in memory.block.spans.items()
        }
        self._lent = lent
        self._own: int | None = None

    @property
    def in_use(self) -> bool:
        """Whether somebody holds an array of this room. First asked before one is given away."""
        references = sum(map(sys.getrefcount, self._lent))
        if self._own is None:
            self._own = references
        return references > self._own


class Bucket:
    """Gradients that are exchanged together. All ranks make one, with equal arguments.

    Args:
        infos: Dtype and shape of each tensor of the model.
        tensors: The numbers of those that are in this bucket, in the order in which they are to lie.
        collectives: Whose memory and messages are used.
        average: Divide by the sum of the weights.
        chunk_bytes: What is summed at a time: as many bytes of each rank as stay in a core's cache.
        message_bytes: Bytes that are exchanged between hosts at a time.
        separate: Keep results apart from gradients, so that an exchange can be repeated.
        lend: In how many rooms there are results to be lent.

    Attributes:
        tensors: In the order in which they lie.
        large: Those of at least `LARGE_BYTES`.
        lent: Nobody writes into the results of the last exchange as long as somebody holds them (see `result_of`).
    """

    _shares_results = True
    _whole = False

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        tensors: Sequence[int],
        collectives: HierarchicalCollectives,
        average: bool,
        chunk_bytes: int,
        message_bytes: int,
        separate: bool = False,
        lend: int = 0,
    ) -> None:
        self.large = {index for index in tensors if nbytes_of(infos[index]) >= LARGE_BYTES}
        self.tensors = sorted(tensors, key=lambda index: index not in self.large)
        self.collectives = collectives
        self.layers = collectives.layers
        self.host = collectives.layers.host
        self._average = average
        self._separate = separate or lend > 0
        self._chunk_bytes = chunk_bytes if self.layers.hosts == 1 else message_bytes
        self._factors: list[float] | None = None
        self._divisor = 1.0
        self._weight_at = len(self.tensors)
        header = self.host.allocate(8 * (len(self.tensors) + WORDS + lend))
        self._headers = [part.view(np.float64) for part in header]
        self._total = np.empty_like(self._headers[0])
        self._told: list[bool] | None = None
        blocks = lay_out(infos, self._parts(), self._whole, self.tensors)
        gradients = [self._allocate(block) for block in blocks]
        self._gradient_of: dict[int, Array] = {}
        for block, arrays in zip(blocks, gradients, strict=True):
            for index, span in block.spans.items():
                self._gradient_of[index] = arrays[self.host.rank][span.start : span.stop]
        self._parts_of_large: dict[int, list[tuple[Stretch, int, int]]] = {}
        if lend:  # and one more, for copies, if all are in use
            self._rooms = [self._lendable_room(blocks, gradients) for _ in range(lend + 1)]
        else:
            results = [self._allocate(block) for block in blocks] if separate else gradients
            self._rooms = [self._room(blocks, gradients, results, self._shares_results)]
        self._room_now = self._rooms[0]
        self.lent = False
        wanted = max((s.kernel.wide.itemsize * s.cuts[0].part.stop for s in self.stretches), default=0)
        self._scratch = np.empty((2, -(-wanted // 16) * 16), np.uint8)

    @property
    def memories(self) -> list[Memory]:
        """Where the gradients, and the results of the last exchange, lie."""
        return self._room_now.memories

    @property
    def stretches(self) -> list[Stretch]:
        """What this rank answers for."""
        return self._room_now.stretches

    def _parts(self) -> int:
        return self.layers.owners

    def _part_of(self, block: Block) -> tuple[int, int]:
        """What this rank sums, on its host."""
        number, owners = self.host.rank, self.layers.owners
        if number >= owners:
            return 0, 0
        each = self._parts() // owners
        return block.bounds[number * each], block.bounds[(number + 1) * each]

    def _allocate(self, block: Block) -> list[Array]:
        """Memory of each rank for a block."""
        storage = arithmetic(block.dtype, ReduceOp.SUM).storage
        return [piece.view(storage) for piece in self.host.allocate(block.length * storage.itemsize)]

    def _room(
        self,
        blocks: Sequence[Block],
        gradients: Sequence[list[Array]],
        results: Sequence[list[Array]],
        share: bool,
        lent: Sequence[Array] = (),
    ) -> Room:
        memories = [
            Memory(block, arithmetic(block.dtype, ReduceOp.SUM), *arrays)
            for block, *arrays in zip(blocks, gradients, results, strict=True)
        ]
        stretches = [stretch for memory in memories for stretch in self._stretches_of(memory, share)]
        return Room(memories, stretches, self.host.rank, lent)

    def _lendable_room(self, blocks: Sequence[Block], gradients: Sequence[list[Array]]) -> Room:
        """One memory for all ranks of the host, which each of them can give away by itself."""
        results, lent = [], []
        for block in blocks:
            storage = arithmetic(block.dtype, ReduceOp.SUM).storage
            memory = self.host.allocate_together(block.length * storage.itemsize)
            # A view of this array refers to it and not to what is behind it, as that is a memoryview and no array.
            counted = np.frombuffer(memoryview(memory), storage)  # type: ignore[arg-type]
            lent.append(counted)
            results.append([counted] * self.host.size)
        return self._room(blocks, gradients, results, False, lent)

    def _stretches_of(self, memory: Memory, share: bool) -> Iterator[Stretch]:
        begin, end = self._part_of(memory.block)
        length = max(1, self._chunk_bytes // memory.kernel.storage.itemsize)

        def stretch(start: int, stop: int) -> Stretch:
            return Stretch(memory, start, stop, self.host.rank, length, share)

        if self.layers.hosts > 1:  # few and long messages
            if begin < end:
                yield stretch(begin, end)
            return
        small: tuple[int, int] | None = None
        for index, span in memory.block.spans.items():
            start, stop = max(span.start, begin), min(span.stop, end)
            if start >= stop:
                continue
            if index not in self.large:
                small = (small[0] if small else start, stop)
                continue
            if small:
                yield stretch(*small)
                small = None
            large = stretch(start, stop)
            self._parts_of_large.setdefault(index, []).append((large, start - span.start, stop - span.start))
            yield large
        if small:
            yield stretch(*small)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds for the exchange."""
        rank = self.host.rank
        own = sum(memory.gradients[rank].nbytes * (2 if self._separate else 1) for memory in self.memories)
        return int(own + self._headers[0].nbytes + self._scratch.nbytes)

    def memory_of(self, index: int) -> Array:
        """The flat memory where this rank's gradient of tensor `index` is expected. bfloat16 as its bits in uint16."""
        return self._gradient_of[index]

    def result_of(self, index: int) -> Array:
        """The flat memory where the combined gradient of tensor `index` is after the last exchange.

        If the bucket lends results, an array that is counted: the memory is left alone while this array, or a view of it, is
        there, if `lent`; until the next exchange, if not.
        """
        result = self._room_now.result_of[index]
        return result[:] if len(self._rooms) > 1 else result

    def part_of(self, index: int) -> tuple[int, int]:
        """Which elements of tensor `index` only this rank reads of its own gradient, so that `place` may be called for them.

        None of a small tensor, nor on several hosts: (0, 0).
        """
        if index not in self._parts_of_large:
            return 0, 0
        _, start, stop = self._parts_of_large[index][0]
        return start, stop

    def stays(self, index: int) -> bool:
        """Whether the combined gradient of tensor `index` is afterwards in the array given to `place`, all of it."""
        start, stop = self.part_of(index)
        return start < stop and not self._separate and stop - start == self._gradient_of[index].size

    def place(self, index: int, gradient: Array | None) -> None:
        """Say where this rank's own part of its gradient of tensor `index` is: in this array, or, if None, in `memory_of`.

        Args:
            index: A tensor that has a part of its own.
            gradient: Shape ``(stop - start,)``, of the dtype of `memory_of`.
        """
        for stretch, _, _ in self._parts_of_large[index]:
            stretch.place(gradient, self._keeps(index))

    def _keeps(self, index: int) -> bool:
        return self.stays(index)

    def exchange(self, used: Sequence[bool], said: Said, record: BucketRecord | None = None) -> Exchanged:
        """Combine the gradients over the ranks.

        Args:
            used: For each tensor of the model, whether this rank has a gradient of it.
            said: What else this rank says.
            record: Is told when all ranks are ready.
        """
        told = self._tell([used[index] for index in self.tensors], said)
        if record is not None:
            record.ready()
        if not told.stopped and (told.divisor > 0 or not any(told.anywhere)):
            self._reduce()
        self.host.meet()
        return told

    def alone(self, used: Sequence[bool]) -> None:
        """What `exchange` does if there is one rank only."""
        self._choose_room([room.in_use for room in self._rooms[:-1]])
        for index in self.tensors:
            if not used[index]:
                self._forget(index)
            elif self._separate:
                whole = self._parts_of_large.get(index)  # one rank answers for all of it
                self.result_of(index)[:] = whole[0][0].gradient if whole else self._gradient_of[index]

    def _forget(self, index: int) -> None:
        if index in self._parts_of_large:
            self.place(index, None)
        self._gradient_of[index][:] = 0

    def _tell(self, used: Sequence[bool], said: Said) -> Exchanged:
        """Exchange headers. Afterwards the gradients of all ranks may be read."""
        mine = self._headers[self.host.rank]
        at = self._weight_at
        if used != self._told:
            mine[:at] = used
            self._told = list(used)
        mine[at : at + WORDS] = words(said)
        mine[at + WORDS :] = [room.in_use for room in self._rooms[:-1]]
        if not all(used):
            for index, there in zip(self.tensors, used, strict=True):
                if not there:
                    self._forget(index)
        self.host.meet()
        total = self._total
        if self.layers.hosts > 1:
            np.copyto(total, mine)
            self.host.wait_until(self.collectives.flat.start_sum(total))
        else:
            np.copyto(total, self._headers[0])
            for header in self._headers[1:]:
                np.add(total, header, out=total)
        told = read((total[:at] > 0).tolist(), total[at : at + WORDS].tolist())
        self._divisor = told.divisor
        self._factors = [float(header[at]) for header in self._headers] if total[at + 1] > 0 else None
        self._choose_room(total[at + WORDS :].tolist())
        return told

    def _choose_room(self, in_use: Sequence[float]) -> None:
        """Put results where no rank looks; in the last room, which is never lent, if all others are in use."""
        number = next((number for number, ranks in enumerate(in_use) if not ranks), len(in_use))
        self._room_now = self._rooms[number]
        self.lent = number < len(in_use)

    def _reduce(self) -> None:
        cross = self.layers.cross
        for stretch in self.stretches:
            kernel = stretch.kernel
            for sources, result, others in stretch.chunks():
                wide = self._sum(kernel, sources, result, stretch.in_place)
                if cross is not None:
                    cross.allreduce(wide, ReduceOp.SUM)
                self._divide(wide)
                if wide is not result:
                    kernel.narrow(wide, result)
                for other in others:
                    np.copyto(other, result)

    def _sum(self, kernel: Arithmetic, sources: Sequence[Array], result: Array, in_place: bool) -> Array:
        """The weighted sum of a chunk over the ranks of the host: in `result` if that can be, or in scratch.

        Args:
            in_place: `result` is one of the sources.
        """
        if self._factors is None:
            direct = kernel.exact and not (in_place and len(sources) > 2)
            into: Array = result if direct else self._scratch[0].view(kernel.wide)[: result.size]
            kernel.combine(sources, into)
            return into
        wide: Array = self._scratch[0].view(kernel.wide)[: result.size]
        term = self._scratch[1].view(kernel.wide)[: result.size]
        wide[:] = 0
        for source, factor in zip(sources, self._factors, strict=True):
            if factor:  # whoever has no samples may hold anything
                kernel.widen(source, term)
                np.multiply(term, factor, out=term)
                np.add(wide, term, out=wide)
        return wide

    def _divide(self, wide: Array) -> None:
        if self._average:
            np.divide(wide, self._divisor, out=wide)
