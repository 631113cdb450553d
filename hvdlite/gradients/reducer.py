"""`Reducer`: gradients in buckets of flat memory, the hot path. All ranks have the same layout and negotiate nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdlite.comm.hierarchical import HierarchicalCollectives
from hvdlite.comm.host import VERY_PATIENT
from hvdlite.errors import ArgumentError, HvdliteError
from hvdlite.gradients.aggregator import Aggregator
from hvdlite.gradients.bucket import Bucket
from hvdlite.gradients.header import Header, HeaderSum, check_divisor
from hvdlite.gradients.result_buffers import BucketRules
from hvdlite.protocols import Array, Plan, ReduceOp, TensorInfo
from hvdlite.ranks.topology import Members
from hvdlite.timeline import BucketRecord, Counts, Timeline
from hvdlite.watchdog.watchdog import Watchdog

_CLOSE_SECONDS = 1.0
"""The seconds that a thread may take to notice that its exchange was stopped."""


class Postponed(Exception):
    """Raised on all ranks if nothing was exchanged.

    Attributes:
        told: The sum of the headers. `HeaderSum.stopped` is true.
    """

    def __init__(self, told: HeaderSum) -> None:
        super().__init__()
        self.told = told


def check_combinable(op: ReduceOp) -> None:
    """Raise unless gradients can be combined by `op`.

    Raises:
        ArgumentError: `op` is neither SUM nor AVERAGE.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ArgumentError(f"op={op!r}: gradients are combined by Average or Sum.")


class ReducerContext(NamedTuple):
    """What a group gives each of its reducers.

    Attributes:
        members: The ranks that take part.
        watch: Watches each exchange.
        timeline: Records each exchange.
    """

    members: Members
    watch: Watchdog
    timeline: Timeline


class Reducer:
    """The gradients of one model on one rank. All ranks make one, with equal arguments.

    Args:
        infos: Dtype and shape of each tensor.
        collectives: The memory and messages of the ranks, for this reducer alone.
        op: SUM or AVERAGE.
        plan: How gradients are exchanged. With several buckets, results lie apart from gradients (see
            `hvdlite.gradients.overlap`).
        context: What all reducers of the group have.
        aggregator: Combines the gradients, in one bucket; None for their weighted sum.

    Attributes:
        buckets: The buckets, in the order of their exchanges.
        timeline: Records each exchange.
        waiting: For a with statement, while another thread of this rank exchanges.
        told: The sum of the headers of the last bucket, in the last exchange.
        stood_in: In how many exchanges of other ranks this rank has taken part without data.
        number: A number that no other reducer of the group has, the same on all ranks. Who makes the reducer sets it.

    Raises:
        ArgumentError: `op` is neither SUM nor AVERAGE.
        UnsupportedTensorError: A dtype is neither floating-point nor complex.
    """

    def __init__(
        self,
        infos: Sequence[TensorInfo],
        collectives: HierarchicalCollectives,
        op: ReduceOp,
        plan: Plan,
        context: ReducerContext,
        aggregator: Aggregator | None = None,
    ) -> None:
        check_combinable(op)
        self._aggregator = aggregator
        self._collectives = collectives
        self._average = op is ReduceOp.AVERAGE
        members, watch, self.timeline = context
        self._members, self._watch = members, watch
        self._busy = threading.Lock()
        channel = watch.new_channel(members)
        self._link = watch.link(members, channel, collectives.stop)
        self._watching = watch.guarded(self._name, members, channel=channel, link=self._link)
        self.waiting = watch.guarded(self._name, members, remember=False, channel=channel, link=self._link)
        self._steps = 1
        self._count = len(infos)
        self._about = f"{self._count} tensors with {sum(math.prod(info.shape) for info in infos):,} values"
        self.told = HeaderSum([], 1.0)
        self.stood_in = 0
        self.number = 0
        self._spare = plan.spare
        self.buckets = self._make_buckets(infos, plan)
        self._bucket_of = {index: bucket for bucket in self.buckets for index in bucket.tensors}

    def _make_buckets(self, infos: Sequence[TensorInfo], plan: Plan) -> list[Bucket]:
        groups = plan.buckets or (tuple(range(len(infos))),)
        rules = BucketRules(plan, self._average, repeatable=len(groups) > 1)
        return [Bucket(infos, group, self._collectives, rules, self._aggregator) for group in groups]

    def bucket_of(self, index: int) -> Bucket:
        """Return the bucket of tensor `index`."""
        return self._bucket_of[index]

    def memory_of(self, index: int, number: int = 0) -> Array:
        """Return the flat memory for this rank's gradient. It has the tensor's dtype; bfloat16 is its bits in uint16.

        Args:
            index: The number of the tensor.
            number: The number of the buffer that this rank uses (see `BufferPool.number`).
        """
        return self._bucket_of[index].pool.memory_of(index, number)

    def result_of(self, index: int, number: int = 0) -> Array:
        """Return the flat memory of the combined gradient after an exchange; the same as `memory_of` if results are in place.

        With ``plan.lend``, ask for it after each exchange: see `BufferPool.result_of`.
        """
        return self._bucket_of[index].pool.result_of(index, number)

    def is_lent(self, index: int) -> bool:
        """Return whether a framework may keep the combined gradient of tensor `index` where it lies: see `BufferPool.lent`."""
        return self._bucket_of[index].pool.lent

    def close(self) -> None:
        """Release the memory and the channels. Every rank calls this. The reducer must not be used afterwards."""
        self._collectives.stop()
        # A thread may be in an exchange that never ends, because no step came after a backward pass.
        if self._busy.acquire(timeout=_CLOSE_SECONDS):
            self.buckets, self._bucket_of = [], {}
            self._collectives.close()
            # They refer to this object. Without this cycle the memory is released now, and not by the garbage collector.
            del self._watching, self.waiting

    @property
    def nbytes(self) -> int:
        """The bytes that this rank holds for the exchange."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def alone(self) -> bool:
        """Whether there is one rank only, whose gradients are their own results."""
        return self._collectives.size == 1 and self._aggregator is None

    @property
    def exchanges(self) -> int:
        """The number of exchanges, including postponed ones. It is the same on all ranks, with data or without."""
        return self._steps - 1

    @property
    def divisor(self) -> float:
        """The sum of the weights of all ranks in the last exchange."""
        return self.told.divisor

    @property
    def joined(self) -> int:
        """The number of ranks without data in the last exchange."""
        return self.told.joined

    def exchange(self, used: Sequence[bool], said: Header = Header()) -> list[bool]:  # noqa: B008  # it cannot change
        """Combine the gradients over the ranks.

        Args:
            used: For each tensor, whether this rank has a gradient of it in `memory_of`.
            said: What else this rank says.

        Returns:
            For each tensor, whether any rank has a gradient of it. If no rank has one, the result is zeros.

        Raises:
            Postponed: Some rank has news, or the headers do not fit together. Raised on all ranks.
            HvdliteError: The weights of all ranks are 0, so there is no average. Raised on all ranks.
        """
        if self.alone:
            told = [
                HeaderSum([used[i] for i in bucket.tensors], said.weight, news=said.news) for bucket in self.buckets
            ]
            if not said.news:
                for bucket in self.buckets:
                    bucket.alone(used)
        else:
            with self.timeline.wait("gradients"):
                told = self.exchange_buckets(used, said)
        self.next_step()
        return self.outcome(told)

    def works_for_another(self) -> None:
        """Mark the calling thread as one for which the program's thread waits (`waiting`)."""
        self._watch.users.leave_out()

    def sum_over_ranks(self, value: float) -> float:
        """Return the sum of a number over all ranks. Every rank calls this at the same point between exchanges."""
        total = np.array([value], np.float64)
        if not self.alone:
            with self._watch.guarded(lambda: f"a sum in step {self._steps - 1}", self._members, link=self._link):
                self._collectives.allreduce(total, ReduceOp.SUM)
        return float(total[0])

    def stand_in(self) -> list[bool] | None:
        """Take part in an exchange of the other ranks without data.

        Returns:
            For each tensor, whether any rank has a gradient of it; None if all ranks have run out of data.

        Raises:
            Postponed, HvdliteError: See `exchange`.
        """
        nothing = [False] * self._count
        for bucket in self.buckets if self._spare else ():  # the program may hold views of the first buffer
            bucket.pool.number = 1
        said = Header(0.0, joined=True)
        with self._collectives.host.patiently(VERY_PATIENT):  # it may take the others a whole step
            told = self.exchange_buckets(nothing, said)
            if told[-1].again and not told[-1].stopped:
                told = self.exchange_buckets(nothing, said)
        self.next_step()
        if told[-1].joined == self._collectives.size:
            return None
        self.stood_in += 1
        return self.outcome(told)

    def try_to_stand_in(self) -> list[bool] | None:
        """Do as `stand_in`, but return an empty list if the exchange fails or is postponed: the other ranks handle that."""
        try:
            return self.stand_in()
        except (HvdliteError, Postponed):
            return []

    def next_step(self) -> None:
        """Count a step: the exchanges from now on belong to the next one."""
        self._steps += 1

    def exchange_bucket(self, number: int, used: Sequence[bool], said: Header) -> HeaderSum:
        """Exchange one bucket. All ranks exchange the buckets in order."""
        bucket, counts = self.buckets[number], self.timeline.counts
        record: BucketRecord | Counts | None = counts
        if self.timeline.on:
            record = BucketRecord(self.timeline, f"bucket {number}", self._steps, bucket.nbytes, self._members.ranks)
        with self._busy, self._watching, np.errstate(all="ignore"):
            told = bucket.exchange(used, said, record)
        if isinstance(record, BucketRecord):
            record.done()
        elif counts is not None:
            counts.done(0 if told.stopped else bucket.payload)
        return told

    def exchange_buckets(self, used: Sequence[bool], said: Header) -> list[HeaderSum]:
        """Exchange all buckets, with the same words in all headers."""
        return [self.exchange_bucket(number, used, said) for number in range(len(self.buckets))]

    def _name(self) -> str:
        return f"gradient exchange {self._steps} of {self._about}"

    def outcome(self, told: Sequence[HeaderSum]) -> list[bool]:
        """Return and raise what `exchange` does, from the header sums of all buckets."""
        self.told = told[-1]
        for each in told:
            if each.stopped:
                raise Postponed(each)
        self.timeline.step()
        anywhere = [False] * self._count
        for bucket, (there, divisor, *_) in zip(self.buckets, told, strict=True):
            if divisor <= 0:
                check_divisor(self._average, divisor, any(there))
            for index, answer in zip(bucket.tensors, there, strict=True):
                anywhere[index] = answer
        return anywhere
