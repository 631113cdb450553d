"""Some of a model's gradients in flat memory, and their sum over the ranks.

Gradients lie in memory that the other ranks of the host can read. Each rank answers for a part of it: it sums that part of
everybody's memory, a chunk at a time so that the chunk stays in its cache, divides, and writes it where it is needed::

    memory of rank 0   ├── part 0 ──┼── part 1 ──┤      rank 0 reads both parts 0, writes both
    memory of rank 1   ├── part 0 ──┼── part 1 ──┤      rank 1 reads both parts 1, writes both

Nobody else reads a rank's own part of its own gradients. On one host such a part of a large tensor may therefore be summed
where the framework left it (`Bucket.place`), which spares the copy. On several hosts, what a host has summed of a part is
then summed over the hosts by the ranks of equal number (see `hvdlite.comm.layers`).

What may differ between ranks is told first, in a short header: which tensors have a gradient, and how many samples they are
the mean of. The weighted sum of the gradients divided by the sum of the weights is the gradient of the joined batch whatever
the shares of the ranks, nothing included.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hvdlite.arithmetic import Arithmetic, arithmetic, nbytes_of
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.layout import Block, lay_out
from hvdlite.protocols import Array, ReduceOp, TensorInfo
from hvdlite.timeline import BucketRecord

LARGE_BYTES = 2**14
"""A smaller tensor is sooner copied than looked at: those lie side by side, and are summed together."""

_EXTRA = 5
_WEIGHT = -_EXTRA
"""The end of a header: the weight, how far it is from 1, whether this exchange has to be repeated or put off, and whether the
rank has run out of data."""


class Said(NamedTuple):
    """What a rank says to the others with its gradients.

    Attributes:
        weight: Its share in an average: the number of samples that its gradients are the mean of.
        again: It asks all ranks to repeat their exchanges.
        news: It asks all ranks to put this exchange off. Gradients stay as they are.
        joined: It has run out of data.
    """

    weight: float = 1.0
    again: bool = False
    news: bool = False
    joined: bool = False


class Exchanged(NamedTuple):
    """What ranks have told each other.

    Attributes:
        anywhere: For each tensor of the bucket, whether any rank has a gradient of it.
        divisor: The sum of the weights.
        again: Some rank asks for a repetition.
        news: Some rank has to say something first: nothing was exchanged.
        joined: The number of ranks that have run out of data.
    """

    anywhere: list[bool]
    divisor: float
    again: bool = False
    news: bool = False
    joined: int = 0


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

    Attributes:
        tensors: In the order in which they lie.
        large: Those of at least `LARGE_BYTES`.
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
    ) -> None:
        self.large = {index for index in tensors if nbytes_of(infos[index]) >= LARGE_BYTES}
        self.tensors = sorted(tensors, key=lambda index: index not in self.large)
        self.collectives = collectives
        self.layers = collectives.layers
        self.host = collectives.layers.host
        self._average = average
        self._separate = separate
        self._chunk_bytes = chunk_bytes if self.layers.hosts == 1 else message_bytes
        self._factors: list[float] | None = None
        self._divisor = 1.0
        self._headers = [part.view(np.float64) for part in self.host.allocate(8 * (len(self.tensors) + _EXTRA))]
        self._total = np.empty_like(self._headers[0])
        self._told: list[bool] | None = None
        blocks = lay_out(infos, self._parts(), self._whole, self.tensors)
        self.memories = [self._allocate(block) for block in blocks]
        self._gradient_of: dict[int, Array] = {}
        self._result_of: dict[int, Array] = {}
        for memory in self.memories:
            for index, span in memory.block.spans.items():
                self._gradient_of[index] = memory.gradients[self.host.rank][span.start : span.stop]
                self._result_of[index] = memory.results[self.host.rank][span.start : span.stop]
        self._parts_of_large: dict[int, tuple[Stretch, int, int]] = {}
        self.stretches = [stretch for memory in self.memories for stretch in self._stretches_of(memory)]
        wanted = max((s.kernel.wide.itemsize * s.cuts[0].part.stop for s in self.stretches), default=0)
        self._scratch = np.empty((2, -(-wanted // 16) * 16), np.uint8)

    def _parts(self) -> int:
        return self.layers.owners

    def _part_of(self, block: Block) -> tuple[int, int]:
        """What this rank sums, on its host."""
        number = self.host.rank
        return (block.bounds[number], block.bounds[number + 1]) if number < self.layers.owners else (0, 0)

    def _allocate(self, block: Block) -> Memory:
        kernel = arithmetic(block.dtype, ReduceOp.SUM)
        nbytes = block.length * kernel.storage.itemsize
        gradients = [piece.view(kernel.storage) for piece in self.host.allocate(nbytes)]
        results = gradients
        if self._separate:
            results = [piece.view(kernel.storage) for piece in self.host.allocate(nbytes)]
        return Memory(block, kernel, gradients, results)

    def _stretches_of(self, memory: Memory) -> Iterator[Stretch]:
        begin, end = self._part_of(memory.block)
        length = max(1, self._chunk_bytes // memory.kernel.storage.itemsize)

        def stretch(start: int, stop: int) -> Stretch:
            return Stretch(memory, start, stop, self.host.rank, length, self._shares_results)

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
            self._parts_of_large[index] = large, start - span.start, stop - span.start
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
        """The flat memory where the combined gradient of tensor `index` is afterwards."""
        return self._result_of[index]

    def part_of(self, index: int) -> tuple[int, int]:
        """Which elements of tensor `index` only this rank reads of its own gradient, so that `place` may be called for them.

        None of a small tensor, nor on several hosts: (0, 0).
        """
        if index not in self._parts_of_large:
            return 0, 0
        _, start, stop = self._parts_of_large[index]
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
        self._parts_of_large[index][0].place(gradient, self._keeps(index))

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
        if not told.news and (told.divisor > 0 or not any(told.anywhere)):
            self._reduce()
        self.host.meet()
        return told

    def alone(self, used: Sequence[bool]) -> None:
        """What `exchange` does if there is one rank only."""
        for index in self.tensors:
            if not used[index]:
                self._forget(index)
            elif self._separate:
                self._result_of[index][:] = self._gradient_of[index]

    def _forget(self, index: int) -> None:
        if index in self._parts_of_large:
            self.place(index, None)
        self._gradient_of[index][:] = 0

    def _tell(self, used: Sequence[bool], said: Said) -> Exchanged:
        """Exchange headers. Afterwards the gradients of all ranks may be read."""
        mine = self._headers[self.host.rank]
        if used != self._told:
            mine[:_WEIGHT] = used
            self._told = list(used)
        weight, again, news, joined = said
        mine[_WEIGHT:] = weight, abs(weight - 1.0), again, news, joined
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
        *sums, self._divisor, oddity, agains, newses, joins = total.tolist()
        self._factors = [float(header[_WEIGHT]) for header in self._headers] if oddity > 0 else None
        return Exchanged([each > 0 for each in sums], self._divisor, agains > 0, newses > 0, int(joins))

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
