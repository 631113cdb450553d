"""Some of a model's gradients in flat memory, and their sum over the ranks.

Gradients lie in memory that the other ranks of the host can read. Each rank answers for a part of it: it sums that part of
everybody's memory, a chunk at a time so that the chunk stays in its cache, divides, and writes it where it is needed::

    memory of rank 0   ├── part 0 ──┼── part 1 ──┤      rank 0 reads both parts 0, writes both
    memory of rank 1   ├── part 0 ──┼── part 1 ──┤      rank 1 reads both parts 1, writes both

Nobody else reads a rank's own part of its own gradients. On one host such a part of a large tensor may therefore be summed
where the framework left it (`Bucket.place`), which spares the copy. On several hosts, what a host has summed of a part is
then summed over the hosts by the ranks of equal number (see `hvdlite.comm.hierarchy`).

What may differ between ranks is told first, in a short header (`hvdlite.gradients.header`): which tensors have a gradient, and
how many samples they are the mean of. The weighted sum of the gradients divided by the sum of the weights is the gradient of
the joined batch whatever the shares of the ranks, nothing included.

Results lie where the gradients do; or apart from them, so that an exchange can be repeated. Each rank may have a second room
for them, for a program may still hold what it was given of the first one. The header tells which of its rooms a rank uses. The
pages of a room that is never used are never there.

Or results lie in memory that is lent to a framework, which reads it without a copy for as long as it likes. All ranks of a host
read the same lent memory, so each writes its part once. There are a few such rooms. The header tells which of them somebody on
this rank still looks at, and all ranks take the first that is free everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.gradients.header import WORDS, Header, HeaderSum, read, words
from hvdlite.gradients.layout import Block, lay_out
from hvdlite.gradients.result_buffers import ResultBuffers
from hvdlite.gradients.segments import Memory, Owned, Stretch
from hvdlite.protocols import Array, ReduceOp, TensorInfo
from hvdlite.tensors.reduction import Reduction, nbytes_of, reduction
from hvdlite.timeline import BucketRecord

LARGE_BYTES = 2**14
"""A smaller tensor is sooner copied than looked at: those lie side by side, and are summed together."""


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
        spare: Each rank has a second room.

    Attributes:
        tensors: In the order in which they lie.
        large: Those of at least `LARGE_BYTES`.
        room: The number of the room that this rank uses.
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
        spare: bool = False,
    ) -> None:
        self.large = {index for index in tensors if nbytes_of(infos[index]) >= LARGE_BYTES}
        self.tensors = sorted(tensors, key=lambda index: index not in self.large)
        self.collectives = collectives
        self.host = collectives.host
        self._average = average
        self._separate = separate or lend > 0
        self._chunk_bytes = chunk_bytes if self.collectives.hosts == 1 else message_bytes
        self._factors: list[float] | None = None
        self._divisor = 1.0
        self._weight_at = len(self.tensors)
        header = self.host.allocate(8 * (len(self.tensors) + WORDS + 1 + lend))
        self._headers = [part.view(np.float64) for part in header]
        self._total = np.empty_like(self._headers[0])
        self._told: list[bool] | None = None
        self._blocks = lay_out(infos, self._parts(), self._whole, self.tensors)
        self._owned = [list(self._owned_of(block)) for block in self._blocks]
        self._own_part = {
            owned.tensor: (owned.start - block.spans[owned.tensor].start, owned.stop - block.spans[owned.tensor].start)
            for block, some in zip(self._blocks, self._owned, strict=True)
            for owned in some
            if owned.tensor is not None
        }
        self._staying = {
            owned.tensor
            for block, some in zip(self._blocks, self._owned, strict=True)
            for owned in some
            if not self._separate and owned.tensor is not None and block.spans[owned.tensor] == owned[:2]
        }
        self._placed: dict[int | None, Array] = {}
        self.room = 0
        rooms = 2 if spare else 1
        self._gradients = [self._allocate() for _ in range(1 if self._separate else rooms)]
        self._results = [self._allocate() for _ in range(rooms)] if separate else self._gradients
        self._rooms_of_ranks: dict[tuple[int, ...], ResultBuffers] = {}
        # Those to be lent, and one more, for copies, if all are in use.
        self._rooms = [self._lendable_room() for _ in range(lend + 1)] if lend else [self._room_at(0)]
        self._room_now = self._rooms[0]
        self.lent = False
        stretches = self._room_now.stretches
        wanted = max((s.how.wide_dtype.itemsize * s.cuts[0].part.stop for s in stretches), default=0)
        self._scratch = np.empty((2, -(-wanted // 16) * 16), np.uint8)

    @property
    def memories(self) -> list[Memory]:
        """Where the gradients, and the results of the last exchange, lie."""
        return self._room_now.memories

    def _parts(self) -> int:
        return self.collectives.owners

    def _part_of(self, block: Block) -> tuple[int, int]:
        """What this rank sums, on its host."""
        number, owners = self.host.rank, self.collectives.owners
        if number >= owners:
            return 0, 0
        each = self._parts() // owners
        return block.bounds[number * each], block.bounds[(number + 1) * each]

    def _allocate(self) -> list[list[Array]]:
        """Memory for each block, of each rank."""
        return [
            [piece.view(storage) for piece in self.host.allocate(block.length * storage.itemsize)]
            for block in self._blocks
            for storage in (reduction(block.dtype, ReduceOp.SUM).storage,)
        ]

    def _room_at(self, number: int) -> ResultBuffers:
        """The rooms of this number, of all ranks."""
        return self._room_of_ranks((number,) * self.host.size)

    def _room_of_ranks(self, numbers: tuple[int, ...]) -> ResultBuffers:
        """The room that each rank of the host uses, by its number."""
        if numbers not in self._rooms_of_ranks:
            gradients, results = (
                [
                    [places[min(number, len(places) - 1)][block][rank] for rank, number in enumerate(numbers)]
                    for block in range(len(self._blocks))
                ]
                for places in (self._gradients, self._results)
            )
            in_place = self._results is self._gradients
            self._rooms_of_ranks[numbers] = self._room(
                gradients, gradients if in_place else results, self._shares_results
            )
        return self._rooms_of_ranks[numbers]

    def _room(
        self, gradients: list[list[Array]], results: list[list[Array]], share: bool, lent: Sequence[Array] = ()
    ) -> ResultBuffers:
        memories = [
            Memory(block, reduction(block.dtype, ReduceOp.SUM), *arrays)
            for block, *arrays in zip(self._blocks, gradients, results, strict=True)
        ]
        rank = self.host.rank
        stretches = [
            Stretch(memory, owned, rank, max(1, self._chunk_bytes // memory.how.storage.itemsize), share)
            for memory, some in zip(memories, self._owned, strict=True)
            for owned in some
        ]
        return ResultBuffers(memories, stretches, rank, lent)

    def _lendable_room(self) -> ResultBuffers:
        """One memory for all ranks of the host, which each of them can give away by itself."""
        results, lent = [], []
        for block in self._blocks:
            storage = reduction(block.dtype, ReduceOp.SUM).storage
            memory = self.host.allocate_together(block.length * storage.itemsize)
            # A view of this array refers to it and not to what is behind it, as that is a memoryview and no array.
            counted = np.frombuffer(memoryview(memory), storage)  # type: ignore[arg-type]
            lent.append(counted)
            results.append([counted] * self.host.size)
        return self._room(self._gradients[0], results, False, lent)

    def _owned_of(self, block: Block) -> Iterator[Owned]:
        """What this rank sums of a block."""
        begin, end = self._part_of(block)
        if self.collectives.hosts > 1:  # few and long messages
            if begin < end:
                yield Owned(begin, end, None)
            return
        small: tuple[int, int] | None = None
        for index, span in block.spans.items():
            start, stop = max(span.start, begin), min(span.stop, end)
            if start >= stop:
                continue
            if index not in self.large:
                small = (small[0] if small else start, stop)
                continue
            if small:
                yield Owned(*small, None)
                small = None
            yield Owned(start, stop, index)
        if small:
            yield Owned(*small, None)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds for the exchange."""
        rank = self.host.rank
        own = sum(memory.gradients[rank].nbytes * (2 if self._separate else 1) for memory in self.memories)
        return int(own + self._headers[0].nbytes + self._scratch.nbytes)

    def memory_of(self, index: int, room: int = 0) -> Array:
        """The flat memory where this rank's gradient of tensor `index` is expected. bfloat16 as its bits in uint16.

        Args:
            index: The number of the tensor.
            room: Where this rank uses the room of this number.
        """
        return self._room_at(room).gradient_of[index] if not self._lends else self._room_now.gradient_of[index]

    def result_of(self, index: int, room: int = 0) -> Array:
        """The flat memory where the combined gradient of tensor `index` is after an exchange.

        If the bucket lends results: after the last exchange, in an array that is counted. The memory is left alone while this
        array, or a view of it, is there, if `lent`; until the next exchange, if not.

        Args:
            index, room: As for `memory_of`.
        """
        return self._room_now.result_of[index][:] if self._lends else self._room_at(room).result_of[index]

    @property
    def _lends(self) -> bool:
        return len(self._rooms) > 1

    def part_of(self, index: int) -> tuple[int, int]:
        """Which elements of tensor `index` only this rank reads of its own gradient, so that `place` may be called for them.

        None of a small tensor, nor on several hosts: (0, 0).
        """
        return self._own_part.get(index, (0, 0))

    def stays(self, index: int) -> bool:
        """Whether the combined gradient of tensor `index` is afterwards in the array given to `place`, all of it."""
        return index in self._staying

    def place(self, index: int, gradient: Array | None) -> None:
        """Say where this rank's own part of its gradient of tensor `index` is: in this array, or, if None, in `memory_of`.

        Args:
            index: A tensor that has a part of its own.
            gradient: Shape ``(stop - start,)``, of the dtype of `memory_of`.
        """
        if gradient is None:
            self._placed.pop(index, None)
        else:
            self._placed[index] = gradient

    def _keeps(self, index: int | None) -> bool:
        return index in self._staying

    def exchange(self, used: Sequence[bool], said: Header, record: BucketRecord | None = None) -> HeaderSum:
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
        self._choose_room([self.room], [room.in_use for room in self._rooms[:-1]])
        for index in self.tensors:
            if not used[index]:
                self._forget(index)
            elif self._separate:  # one rank answers for all of it
                self._room_now.result_of[index][:] = self._placed.get(index, self._room_now.gradient_of[index])

    def _forget(self, index: int) -> None:
        self._placed.pop(index, None)
        self.memory_of(index, self.room)[:] = 0

    def _tell(self, used: Sequence[bool], said: Header) -> HeaderSum:
        """Exchange headers. Afterwards the gradients of all ranks may be read."""
        mine = self._headers[self.host.rank]
        at = self._weight_at
        if used != self._told:
            mine[:at] = used
            self._told = list(used)
        mine[at : at + WORDS] = words(said)
        mine[at + WORDS :] = [self.room, *(room.in_use for room in self._rooms[:-1])]
        if not all(used):
            for index, there in zip(self.tensors, used, strict=True):
                if not there:
                    self._forget(index)
        self.host.meet()
        total = self._total
        if self.collectives.hosts > 1:
            np.copyto(total, mine)
            self.host.wait_until(self.collectives.start_sum(total))
        else:
            np.copyto(total, self._headers[0])
            for header in self._headers[1:]:
                np.add(total, header, out=total)
        told = read((total[:at] > 0).tolist(), total[at : at + WORDS].tolist())
        self._divisor = told.divisor
        self._factors = [float(header[at]) for header in self._headers] if total[at + 1] > 0 else None
        rooms, *in_use = total[at + WORDS :].tolist()
        self._choose_room([float(header[at + WORDS]) for header in self._headers] if rooms else [], in_use)
        return told

    def _choose_room(self, numbers: Sequence[float], in_use: Sequence[float]) -> None:
        """Put results where no rank looks; in the last room, which is never lent, if all others are in use.

        Args:
            numbers: The room that each rank of the host uses; empty if all use the first one.
            in_use: For each room to be lent, how many ranks look at it.
        """
        if self._lends:
            number = next((number for number, ranks in enumerate(in_use) if not ranks), len(in_use))
            self._room_now = self._rooms[number]
            self.lent = number < len(in_use)
        else:
            self._room_now = self._room_of_ranks(tuple(map(int, numbers))) if numbers else self._rooms[0]

    def _reduce(self) -> None:
        cross = self.collectives.between_hosts
        for stretch in self._room_now.stretches:
            how = stretch.how
            chunks, in_place = stretch.chunks(self._placed.get(stretch.tensor), self._keeps(stretch.tensor))
            for sources, result, others in chunks:
                wide = self._sum(how, sources, result, in_place)
                if cross is not None:
                    cross.allreduce(wide, ReduceOp.SUM)
                self._divide(wide)
                if wide is not result:
                    how.narrow(wide, result)
                for other in others:
                    np.copyto(other, result)

    def _sum(self, how: Reduction, sources: Sequence[Array], result: Array, in_place: bool) -> Array:
        """The weighted sum of a chunk over the ranks of the host: in `result` if that can be, or in scratch.

        Args:
            in_place: `result` is one of the sources.
        """
        if self._factors is None:
            direct = how.exact and not (in_place and len(sources) > 2)
            into: Array = result if direct else self._scratch[0].view(how.wide_dtype)[: result.size]
            how.combine(sources, into)
            return into
        wide: Array = self._scratch[0].view(how.wide_dtype)[: result.size]
        term = self._scratch[1].view(how.wide_dtype)[: result.size]
        wide[:] = 0
        for source, factor in zip(sources, self._factors, strict=True):
            if factor:  # whoever has no samples may hold anything
                how.combine((source,), term)
                np.multiply(term, factor, out=term)
                np.add(wide, term, out=wide)
        return wide

    def _divide(self, wide: Array) -> None:
        if self._average:
            np.divide(wide, self._divisor, out=wide)
