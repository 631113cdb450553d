"""`BufferPool`: where the gradients and the results of a bucket lie on one host.

Results lie where the gradients lie, or apart from them, so that an exchange can be repeated. Each rank may have a second
buffer, because a program may still hold views of the first. The header says which buffer a rank uses. The pages of a buffer
that is never used are never allocated.

Results may also lie in memory that is lent to a framework, which reads it without a copy as long as it likes. All ranks of a
host read the same lent memory, so each rank writes its part once. There are a few such buffers. The header says which of them
are still referenced on this rank, and all ranks take the first one that is free everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.gradients.ownership import Ownership
from hvdlite.gradients.segments import Memory, Segment
from hvdlite.protocols import Array, Plan, ReduceOp
from hvdlite.tensors.reduction import reduction


class BucketRules(NamedTuple):
    """How a bucket sums gradients, and where its results lie; the same on all ranks.

    Attributes:
        plan: How much is summed and sent at a time, and which buffers there are.
        average: Whether the sum is divided by the sum of the weights.
        repeatable: Whether results lie apart from gradients in memory of each rank, so that an exchange can be repeated.
        shares: Whether each rank gets the results that other ranks sum; else it gets its own shard.
        whole: Never cut a tensor between ranks.
    """

    plan: Plan
    average: bool
    repeatable: bool = False
    shares: bool = True
    whole: bool = False

    @property
    def are_apart(self) -> bool:
        """Whether results lie apart from gradients."""
        return self.repeatable or self.plan.lend > 0


class ResultBuffers:
    """The memory of one choice of buffers, for all ranks of a host.

    Args:
        memories: The memory of each block.
        segments: What this rank sums.
        rank: This rank's number on the host.
        lent: The arrays that lent results are views of; empty if results are not lent. A view holds a reference to its array,
            because NumPy resolves a view of a view to that array.
    """

    def __init__(
        self, memories: list[Memory], segments: Iterable[Segment], rank: int, lent: Sequence[Array] = ()
    ) -> None:
        self.memories = memories
        self.segments = list(segments)
        self.gradient_of: dict[int, Array] = {}
        self.result_of: dict[int, Array] = {}
        for memory in memories:
            for index, (start, stop) in memory.block.spans.items():
                self.gradient_of[index] = memory.gradients[rank][start:stop]
                in_place = memory.results is memory.gradients
                self.result_of[index] = self.gradient_of[index] if in_place else memory.results[rank][start:stop]
        self._lent = lent
        self._own: int | None = None

    @property
    def in_use(self) -> bool:
        """Whether the program holds an array of these results. It must be asked once before an array is given away."""
        references = sum(map(sys.getrefcount, self._lent))
        if self._own is None:
            self._own = references
        return references > self._own


class BufferPool:
    """The buffers of a bucket, and which of them the next exchange uses.

    Args:
        collectives: The ranks, whose memory is used on each host.
        ownership: The layout of the bucket, and what this rank sums of it.
        rules: Which buffers there are.

    Attributes:
        buffers: The number of buffers that each rank has for its gradients.
        now: The buffers of the present exchange, or of the last one.
        number: The number of the buffer that this rank uses, if results are not lent.
        lent: Whether nobody writes to the results of the last exchange as long as the program holds them (see `result_of`).
    """

    def __init__(self, collectives: HierarchicalCollectives, ownership: Ownership, rules: BucketRules) -> None:
        plan = rules.plan
        self._host = collectives.host
        self._ownership = ownership
        self._chunk_bytes = plan.chunk_bytes if collectives.hosts == 1 else plan.message_bytes
        self._shares = rules.shares
        count = 2 if plan.spare else 1
        self.buffers = 1 if rules.are_apart else count
        self._gradients = [self._allocate() for _ in range(self.buffers)]
        self._results = [self._allocate() for _ in range(count)] if rules.repeatable else self._gradients
        self._chosen: dict[tuple[int, ...], ResultBuffers] = {}
        # The buffers to be lent, and one more for copies, if all are in use.
        self._lendable = [self._make_lendable() for _ in range(plan.lend + 1)] if plan.lend else []
        self._first = self._lendable[0] if plan.lend else self._at(0)
        self.now = self._first
        self.number = 0
        self.lent = False

    @property
    def lends(self) -> bool:
        """Whether results are lent to the framework."""
        return bool(self._lendable)

    @property
    def in_use(self) -> list[bool]:
        """For each buffer to be lent, whether the program holds an array of it on this rank."""
        return [buffers.in_use for buffers in self._lendable[:-1]]

    @property
    def largest_chunk(self) -> int:
        """The bytes of the largest chunk that this rank sums, in the dtype in which it is summed."""
        segments = self.now.segments
        return max((each.how.wide_dtype.itemsize * each.cuts[0].part.stop for each in segments), default=0)

    def memory_of(self, index: int, number: int) -> Array:
        """Return the flat memory for this rank's gradient of tensor `index`.

        Args:
            index: The number of the tensor.
            number: The number of the buffer that this rank uses.
        """
        return (self.now if self.lends else self._at(number)).gradient_of[index]

    def range_of(self, block: int, elements: slice, number: int) -> Array:
        """Return some elements of this rank's gradients in a block; the block and the buffer are given by their numbers."""
        return self._at(number).memories[block].gradients[self._host.rank][elements]

    def result_of(self, index: int, number: int) -> Array:
        """Return the flat memory of the combined gradient of tensor `index` after an exchange.

        If results are lent, the memory is that of the last exchange, in an array whose references are counted. If `lent`, the
        memory is not overwritten while this array or a view of it exists; if not, the memory stays until the next exchange.

        Args:
            index: The number of the tensor.
            number: The number of the buffer that this rank uses.
        """
        return self.now.result_of[index][:] if self.lends else self._at(number).result_of[index]

    def choose(self, numbers: Sequence[float], in_use: Sequence[float]) -> None:
        """Choose buffers that no rank holds. If all lendable ones are held, choose the last one, which is never lent.

        Args:
            numbers: The buffer that each rank of the host uses; empty if all ranks use the first one.
            in_use: For each buffer to be lent, how many ranks hold it.
        """
        if self._lendable:
            number = next((number for number, ranks in enumerate(in_use) if not ranks), len(in_use))
            self.now = self._lendable[number]
            self.lent = number < len(in_use)
        else:
            self.now = self._of_ranks(tuple(map(int, numbers))) if numbers else self._first

    def _allocate(self) -> list[list[Array]]:
        """Allocate memory for each block, on each rank."""
        return [
            [piece.view(storage) for piece in self._host.allocate(block.length * storage.itemsize)]
            for block in self._ownership.blocks
            for storage in (reduction(block.dtype, ReduceOp.SUM).storage,)
        ]

    def _at(self, number: int) -> ResultBuffers:
        """Return the buffers with this number, on all ranks."""
        return self._of_ranks((number,) * self._host.size)

    def _of_ranks(self, numbers: tuple[int, ...]) -> ResultBuffers:
        """Return the buffers that the ranks of the host use. `numbers` has one number for each rank."""
        if numbers not in self._chosen:
            gradients, results = (
                [
                    [places[min(number, len(places) - 1)][block][rank] for rank, number in enumerate(numbers)]
                    for block in range(len(self._ownership.blocks))
                ]
                for places in (self._gradients, self._results)
            )
            in_place = self._results is self._gradients
            self._chosen[numbers] = self._make(gradients, gradients if in_place else results, self._shares)
        return self._chosen[numbers]

    def _make(
        self, gradients: list[list[Array]], results: list[list[Array]], share: bool, lent: Sequence[Array] = ()
    ) -> ResultBuffers:
        memories = [
            Memory(block, reduction(block.dtype, ReduceOp.SUM), *arrays)
            for block, *arrays in zip(self._ownership.blocks, gradients, results, strict=True)
        ]
        rank = self._host.rank
        segments = [
            Segment(memory, owned, rank, max(1, self._chunk_bytes // memory.how.storage.itemsize), share)
            for memory, some in zip(memories, self._ownership.owned, strict=True)
            for owned in some
        ]
        return ResultBuffers(memories, segments, rank, lent)

    def _make_lendable(self) -> ResultBuffers:
        """Make one result memory for all ranks of the host, which each rank can lend by itself."""
        results, lent = [], []
        for block in self._ownership.blocks:
            storage = reduction(block.dtype, ReduceOp.SUM).storage
            memory = self._host.allocate_together(block.length * storage.itemsize)
            # A view of this array refers to the array itself, because its base is a memoryview and no array.
            counted = np.frombuffer(memoryview(memory), storage)  # type: ignore[arg-type]
            lent.append(counted)
            results.append([counted] * self._host.size)
        return self._make(self._gradients[0], results, False, lent)
