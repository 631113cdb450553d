"""`ShardedReducer`: each rank gets only its own shard of the combined gradients.

The parameters of a host lie in one shared memory. Every rank of every host owns a shard. The shards of the ranks of equal
number lie side by side in the part of that number, so hosts exchange a part by one reduce-scatter of gradients and one
allgather of parameters::

    part 0: ├ host 0, rank 0 ┼ host 1, rank 0 ┤ part 1: ├ host 0, rank 1 ┼ host 1, rank 1 ┤

A framework whose tensors never change (TensorFlow) gets the parameters of each step in other memory, of which there are a few
buffers in turn (``plan.lend``). Before that, a rank's shard of this memory holds the sums of its gradients: the step that makes
parameters of them writes over them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdlite.comm.between_hosts import scatter_sum
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.gradients.bucket import Bucket, in_order
from hvdlite.gradients.layout import Block, Piece, lay_out, pieces
from hvdlite.gradients.reducer import Reducer, ReducerContext
from hvdlite.gradients.result_buffers import BucketRules
from hvdlite.gradients.segments import Memory
from hvdlite.protocols import Array, Plan, ReduceOp, TensorInfo


class Place(NamedTuple):
    """The place of one rank among those that have shards.

    Attributes:
        shards: The number of shards.
        number: The number of this rank's shard; None if it has none, because its host has more ranks than another one.
    """

    shards: int
    number: int | None

    def pieces(self, infos: Sequence[TensorInfo], whole: bool) -> list[Piece]:
        """Return what a rank at this place owns of tensors.

        Args:
            infos: Dtype and shape of each tensor.
            whole: Never cut a tensor between ranks.
        """
        if self.number is None:
            return []
        blocks = lay_out(infos, self.shards, whole, in_order(infos, range(len(infos)))[1])
        return [piece for block in blocks for piece in pieces(block, self.number)]


def place_of(collectives: HierarchicalCollectives) -> Place:
    """Return the place of this rank."""
    rank, hosts, cross = collectives.host.rank, collectives.hosts, collectives.between_hosts
    number = rank * hosts + (0 if cross is None else cross.rank) if rank < collectives.owners else None
    return Place(collectives.owners * hosts, number)


class Stretch(NamedTuple):
    """Pieces of small tensors that lie side by side in the shard of one rank.

    Attributes:
        pieces: The pieces, in the order in which they lie.
        starts: The first element of each piece, counted from the first one of the first piece.
        parameters: The flat memory of the parameters, from the first piece to the last one.
        gradients: For each buffer of the rank, the flat memory of the same range of its gradients.
    """

    pieces: list[Piece]
    starts: list[int]
    parameters: Array
    gradients: list[Array]


class _ShardedBucket(Bucket):
    """A bucket with all gradients, in which each rank gets only its own shard of the sums."""

    def __init__(self, infos: Sequence[TensorInfo], collectives: HierarchicalCollectives, rules: BucketRules) -> None:
        super().__init__(infos, range(len(infos)), collectives, rules)
        self.shard = place_of(self.collectives).number

    def _parts(self) -> int:
        return place_of(self.collectives).shards

    def publish(self, memory: Memory, parameters: Array) -> None:
        """Send this rank's shard of the parameters to all hosts, and receive theirs."""
        cross, bounds = self.collectives.between_hosts, memory.block.bounds
        if cross is not None and self.shard is not None:
            own = parameters[bounds[self.shard] : bounds[self.shard + 1]].copy()
            begin, end = self.ownership.part_of_block(memory.block)
            cross.allgather(own, parameters[begin:end], self._counts(memory.block))

    def _counts(self, block: Block) -> list[int]:
        """Return how many elements of this rank's part each host owns."""
        first = self.host.rank * self.collectives.hosts
        return [block.bounds[n + 1] - block.bounds[n] for n in range(first, first + self.collectives.hosts)]

    def _reduce(self) -> None:
        if self.collectives.hosts == 1:
            super()._reduce()
        elif self.shard is not None:
            segments = iter(self.pool.now.segments)
            for memory in self.memories:
                begin, end = self.ownership.part_of_block(memory.block)
                if begin < end:
                    self._reduce_between_hosts(
                        memory, np.empty(end - begin, memory.how.wide_dtype), next(segments).cuts
                    )

    def _reduce_between_hosts(self, memory: Memory, part: Array, cuts: Sequence[Any]) -> None:
        cross = self.collectives.between_hosts
        assert cross is not None
        assert self.shard is not None
        bounds, own = memory.block.bounds, memory.gradients[self.host.rank]
        begin, _ = self.ownership.part_of_block(memory.block)
        for cut in cuts:
            mine = own[begin + cut.part.start : begin + cut.part.stop]
            wide = self._sum.sum(memory.how, (*cut.before, mine, *cut.after), part[cut.part], False, True)
            if wide.base is not part:
                np.copyto(part[cut.part], wide)
        lo, hi = bounds[self.shard], bounds[self.shard + 1]
        result = memory.results[self.host.rank]
        scatter_sum(cross, memory.how, part, result[lo:hi], self._counts(memory.block), self._sum.divide)


class ShardedReducer(Reducer):
    """A reducer that gives each rank its shard of the combined gradients.

    Args:
        infos, collectives, op, plan, context: See `Reducer`. There is one bucket.
        whole: Never cut a tensor between ranks.

    Attributes:
        pieces: What this rank owns.
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        collectives: HierarchicalCollectives,
        op: ReduceOp,
        plan: Plan,
        context: ReducerContext,
        whole: bool,
    ) -> None:
        self._whole = whole
        super().__init__(infos, collectives, op, plan, context)
        bucket = self._bucket
        self._lends = plan.lend > 0
        self.pieces = place_of(collectives).pieces(infos, whole)
        self._parameters: list[Array] = []
        self._parameters_of: dict[int, Array] = {}
        for memory in () if self._lends else bucket.memories:
            dtype = memory.how.storage
            parameters = bucket.host.allocate_together(memory.block.length * dtype.itemsize).view(dtype)
            self._parameters.append(parameters)
            for index, span in memory.block.spans.items():
                self._parameters_of[index] = parameters[span.start : span.stop]

    def _make_buckets(self, infos: Sequence[TensorInfo], plan: Plan) -> list[Bucket]:
        rules = BucketRules(plan, self._average, shares=False, whole=self._whole)
        self._bucket = _ShardedBucket(infos, self._collectives, rules)
        return [self._bucket]

    @property
    def buffer(self) -> int:
        """The number of the buffer in which this rank's gradients and sums lie."""
        return self._bucket.pool.number

    def parameters_of(self, index: int) -> Array:
        """Return the flat memory of parameter `index`, which all ranks of the host share. It has the dtype of `memory_of`.

        With ``plan.lend``, it is the memory of `result_of`: after an exchange, this rank's shard holds combined gradients.
        """
        return self.result_of(index) if self._lends else self._parameters_of[index]

    def stretches(self, kind_of: Callable[[int], Hashable | None]) -> list[Stretch]:
        """Return the stretches of two pieces or more, which are as long as can be. For reducers that do not lend.

        Args:
            kind_of: Returns the kind of a tensor, by its number. The pieces of a stretch are of one kind. None for a tensor
                that is in no stretch.
        """
        found, bucket = [], self._bucket
        block_of = {index: number for number, memory in enumerate(bucket.memories) for index in memory.block.spans}

        def key(piece: Piece) -> tuple[int, Hashable | None]:
            return block_of[piece.tensor], None if piece.tensor in bucket.large else kind_of(piece.tensor)

        for (block, kind), group in itertools.groupby(self.pieces, key):
            pieces = list(group)
            if kind is not None and len(pieces) > 1:
                spans = bucket.memories[block].block.spans
                first = spans[pieces[0].tensor].start + pieces[0].start
                elements = slice(first, spans[pieces[-1].tensor].start + pieces[-1].stop)
                starts = [spans[piece.tensor].start + piece.start - first for piece in pieces]
                gradients = [bucket.pool.range_of(block, elements, number) for number in range(bucket.pool.buffers)]
                found.append(Stretch(pieces, starts, self._parameters[block][elements], gradients))
        return found

    def meet(self) -> None:
        """Wait until all ranks of the host are here. Then what they wrote to parameters can be read."""
        what = f"the end of step {self._steps - 1}"
        with self.timeline.wait("parameters"), self._watch.guarded(lambda: what, self._members, link=self._link):
            self._bucket.host.meet()

    def publish(self) -> None:
        """Send this rank's shard of the parameters, which it has changed, to all hosts. Then all ranks may read all."""
        what = f"the parameters of step {self._steps - 1}"
        with self.timeline.wait("parameters"), self._watch.guarded(lambda: what, self._members, link=self._link):
            memories, rank = self._bucket.memories, self._bucket.host.rank
            lent = [memory.results[rank] for memory in memories]
            for memory, parameters in zip(memories, lent if self._lends else self._parameters, strict=True):
                self._bucket.publish(memory, parameters)
            self._bucket.host.meet()
