"""`Bucket`: some of a model's gradients in flat memory, and their sum over the ranks.

Gradients lie in memory that the other ranks of the host can read. Each rank owns a part of the elements. It sums that part of
all ranks' memory, divides it, and writes it where it is needed, a chunk at a time so that the chunk stays in its cache::

    memory of rank 0   ├── part 0 ──┼── part 1 ──┤      rank 0 reads both parts 0, writes both
    memory of rank 1   ├── part 0 ──┼── part 1 ──┤      rank 1 reads both parts 1, writes both

No other rank reads a rank's own part of its own gradients. So on one host this part of a large tensor may be summed where the
framework left it (`Bucket.place`), without a copy. With several hosts, the ranks of equal number then add the sums of their
part over the hosts (see `hvdlite.comm.hierarchy`).

What may differ between ranks travels first, in a short header (`hvdlite.gradients.header`): which tensors have a gradient, and
how many samples the gradients are the mean of. The weighted sum of the gradients, divided by the sum of the weights, is the
gradient of the joint batch, whatever number of samples each rank has, even 0.

`hvdlite.gradients.result_buffers` says where results lie.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.comm.between_hosts import reduce_between_hosts
from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.gradients.aggregator import Aggregator, Weights, run_aggregator
from hvdlite.gradients.header import WORDS, Header, HeaderSum, read, words
from hvdlite.gradients.ownership import Ownership
from hvdlite.gradients.result_buffers import BucketRules, BufferPool
from hvdlite.gradients.segments import Memory
from hvdlite.gradients.weighted_sum import WeightedSum
from hvdlite.protocols import Array, TensorInfo
from hvdlite.tensors.reduction import nbytes_of
from hvdlite.timeline import BucketRecord, Counts

LARGE_BYTES = 2**15
"""A smaller tensor is always copied. Small tensors lie side by side and are summed together. To copy 16 KiB takes less time
than Python takes for a large tensor: 300 layers of 64 by 64 train 4 % faster than with 2^14, and 11 % if sharded."""


def in_order(infos: Sequence[TensorInfo], tensors: Sequence[int]) -> tuple[set[int], list[int]]:
    """Return which tensors are large, and the order in which a bucket has them: large ones first.

    Args:
        infos: Dtype and shape of each tensor of the model.
        tensors: The numbers of the tensors in the bucket.
    """
    large = {index for index in tensors if nbytes_of(infos[index]) >= LARGE_BYTES}
    return large, sorted(tensors, key=lambda index: index not in large)


class Bucket:
    """Gradients that are exchanged together. All ranks make one, with equal arguments.

    Args:
        infos: Dtype and shape of each tensor of the model.
        tensors: The numbers of the tensors in this bucket, in the order in which they shall lie.
        collectives: The memory and messages of the ranks.
        rules: How they are summed, and where the results lie.
        aggregator: Combines the gradients; None for their weighted sum.

    Attributes:
        tensors: The numbers of the tensors, in the order in which they lie: large ones first.
        large: The numbers of the tensors of at least `LARGE_BYTES`.
        ownership: Which elements this rank sums.
        pool: Where gradients and results lie.
        payload: The bytes of the gradients.
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        tensors: Sequence[int],
        collectives: HierarchicalCollectives,
        rules: BucketRules,
        aggregator: Aggregator | None = None,
    ) -> None:
        self._infos, self._aggregator = infos, aggregator
        self.large, self.tensors = in_order(infos, tensors)
        self.collectives = collectives
        self.host = collectives.host
        self.payload = sum(nbytes_of(infos[index]) for index in self.tensors)
        self._is_apart = rules.are_apart
        self._weight_at = len(self.tensors)
        header = self.host.allocate(8 * (len(self.tensors) + WORDS + 1 + rules.plan.lend))
        self._headers = [part.view(np.float64) for part in header]
        self._total = np.empty_like(self._headers[0])
        self._told: list[bool] | None = None
        # An aggregator is shown all gradients in flat memory.
        in_place = not self._is_apart and aggregator is None
        self.ownership = Ownership(infos, self.tensors, self.large, collectives, self._parts(), rules.whole, in_place)
        self.pool = BufferPool(collectives, self.ownership, rules)
        self._lends = self.pool.lends
        self._sum = WeightedSum(self.pool.largest_chunk, rules.average)
        self._placed: dict[int | None, Array] = {}

    @property
    def memories(self) -> list[Memory]:
        """The memory of the gradients, and of the results of the last exchange."""
        return self.pool.now.memories

    def _parts(self) -> int:
        return self.collectives.owners

    @property
    def nbytes(self) -> int:
        """The bytes that this rank holds for the exchange."""
        rank = self.host.rank
        own = sum(memory.gradients[rank].nbytes * (2 if self._is_apart else 1) for memory in self.memories)
        return int(own + self._headers[0].nbytes + self._sum.nbytes)

    def reduces_in_place(self, index: int) -> bool:
        """Return whether an exchange leaves the combined gradient of tensor `index` in the array given to `place`."""
        return index in self.ownership.in_place

    def place(self, index: int, gradient: Array | None) -> None:
        """Set where this rank's own gradient of tensor `index` lies: the part of it that this rank owns.

        Args:
            index: The number of a tensor of which this rank owns a part.
            gradient: An array of shape ``(stop - start,)`` of `Ownership.part_of`, of the dtype of `BufferPool.memory_of`; None
                if the part lies in that memory.
        """
        if gradient is None:
            self._placed.pop(index, None)
        else:
            self._placed[index] = gradient

    def exchange(self, used: Sequence[bool], said: Header, record: BucketRecord | Counts | None = None) -> HeaderSum:
        """Combine the gradients over the ranks.

        Args:
            used: For each tensor of the model, whether this rank has a gradient of it.
            said: What else this rank says.
            record: Notes when all ranks are ready; None if nobody wants to know.

        Returns:
            The sum of the headers of all ranks. If it is `stopped`, gradients are as before.
        """
        told = self._tell([used[index] for index in self.tensors], said)
        if record is not None:
            record.ready()
        # Once all have joined nobody reads a result, and each optimizer that the program still has comes here, in its thread.
        reads = told.joined < self.collectives.size
        if reads and not told.stopped and (told.divisor > 0 or not any(told.anywhere)):
            if self._aggregator is None:
                with self._sum.watching():
                    self._reduce()
            elif any(told.anywhere):
                weights = Weights(said.weight, told.divisor)
                memories, rank = self.pool.now.memories, self.host.rank
                run_aggregator(self._aggregator, memories, rank, self._infos, weights, self.collectives)
        self.host.meet()
        return told

    def alone(self, used: Sequence[bool]) -> None:
        """Do what `exchange` does, if there is one rank only."""
        self.pool.choose([self.pool.number], self.pool.in_use)
        for index in self.tensors:
            if not used[index]:
                self._forget(index)
            elif self._is_apart:  # a single rank owns the whole tensor
                now = self.pool.now
                now.result_of[index][:] = self._placed.get(index, now.gradient_of[index])

    def _forget(self, index: int) -> None:
        self._placed.pop(index, None)
        self.pool.memory_of(index, self.pool.number)[:] = 0

    def _tell(self, used: Sequence[bool], said: Header) -> HeaderSum:
        """Exchange headers. Afterwards the gradients of all ranks may be read."""
        mine = self._headers[self.host.rank]
        at = self._weight_at
        if used != self._told:
            mine[:at] = used
            self._told = list(used)
        mine[at : at + WORDS] = words(said)
        mine[at + WORDS :] = [self.pool.number, *self.pool.in_use] if self._lends else self.pool.number
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
        self._sum.divisor = told.divisor
        self._sum.factors = [float(header[at]) for header in self._headers] if total[at + 1] > 0 else None
        numbers, *in_use = total[at + WORDS :].tolist()
        self.pool.choose([float(header[at + WORDS]) for header in self._headers] if numbers else [], in_use)
        return told

    def _reduce(self) -> None:
        cross = self.collectives.between_hosts
        for segment in self.pool.now.segments:
            how = segment.how
            chunks, in_place = segment.chunks(
                self._placed.get(segment.tensor), segment.tensor in self.ownership.in_place
            )
            for sources, result, others in chunks:
                wide = self._sum.sum(how, sources, result, in_place, cross is not None)
                if cross is not None:
                    reduce_between_hosts(cross, how, wide, result, self._sum.divide)
                else:
                    self._sum.finish(how, wide, result)
                for other in others:
                    np.copyto(other, result)
