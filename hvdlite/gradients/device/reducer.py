"""The buckets of one layout on a device, and the sequence in which this rank launches them.

::

    current stream   … backward ─┬─ pack bucket 0 … backward ─┬─ pack bucket 1 …   ┬─ pack the last ─┐        ┌─ step
    communication                └─▶ sum over the ranks, divide ─▶ sum, divide     └─▶ sum, divide ──┴─ event ┘

Every rank launches every bucket once in each step, in the same order, whatever gradients it has, so no rank has to ask another
rank. The step launches the last bucket. The other buckets are launched as soon as their gradients are there, if the caller
knows that the gradients will not change before the step. If they do change, nothing can repair this, unless all ranks wait for
each other in every step. So a change is an error on all ranks: on this rank at once, and on the other ranks in their next
steps, because the last bucket tells them (`hvdlite.gradients.device.late_changes`).

The host waits for the device only if it must know what other ranks have said: in a step in which this rank lacks a gradient or
has no samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from hvdlite.comm.gpu.collectives import DeviceCollectives
from hvdlite.gradients.device.bucket import DeviceBucket
from hvdlite.gradients.device.late_changes import LateChanges
from hvdlite.gradients.device.tail import Tail
from hvdlite.gradients.header import Header, HeaderSum


class DeviceReducer:
    """The gradients of one model on a device, on one rank. All ranks make one, with equal buckets.

    Args:
        buckets: At least one bucket, in the order of the launches.
        count: The number of gradients.
        collectives: The collectives of the buckets.
        waiting: A context manager for code in which the host waits for other ranks.

    Attributes:
        buckets: The buckets, in the order of the launches.
        launched: The number of buckets that are under way in this step.
        sent_weight: This rank's weight when the first bucket was launched before the step; None if no bucket was.
        told: The sum of all ranks' headers in the last step whose tail this rank has read.
    """

    def __init__(
        self,
        buckets: Sequence[DeviceBucket],
        count: int,
        collectives: DeviceCollectives,
        waiting: AbstractContextManager[Any],
    ) -> None:
        self.buckets = list(buckets)
        self._count = count
        self._collectives, self._waiting = collectives, waiting
        self._device, self._stream = collectives.device, collectives.stream
        self._bucket_of = {index: number for number, bucket in enumerate(self.buckets) for index in bucket.tensors}
        self._changes = LateChanges(self._device, collectives.size)
        self._tail = Tail(self._device, count, together=len(self.buckets) == 1)
        self.told = HeaderSum([], 1.0)
        # The reducer may be dropped while gradients are on their way.
        small = [self._changes.memory, self._tail.memory, self._tail.weight]
        for tensor in (*small, *(each for bucket in self.buckets for each in bucket.memory())):
            self._device.keep(tensor, self._stream)
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a new step. Launches that are still under way do not belong to it."""
        self.launched = 0
        self.sent_weight: float | None = None
        self._seals: list[tuple[int, ...]] = []
        """For each launched bucket, the versions of its memory at the launch."""
        self._missing = [len(bucket.tensors) for bucket in self.buckets]

    def view_of(self, index: int) -> Any:
        """Return the tensor where gradient `index` is expected, and where the combined gradient is after an exchange."""
        return self.buckets[self._bucket_of[index]].views[index]

    def sent_memory(self) -> list[Any]:
        """Return the memory of the gradients that are under way."""
        return [flat.memory for bucket in self.buckets[: self.launched] for flat in bucket.flats]

    # Before a step

    def is_sent(self, index: int) -> bool:
        """Return whether gradient `index` is under way."""
        return self._bucket_of[index] < self.launched

    def ready(self, index: int) -> bool:
        """Note that this rank has gradient `index`, which will not change before the step. Call this once a step at most.

        Returns:
            Whether a bucket is to be launched now; see `next_ready`.
        """
        missing = self._missing
        missing[self._bucket_of[index]] -= 1
        return missing[self.launched] == 0 and self.launched < len(missing) - 1

    def next_ready(self) -> DeviceBucket | None:
        """Return the bucket to launch now by `launch_early`; None if the next bucket lacks gradients, or is the last one."""
        if self.launched < len(self.buckets) - 1 and self._missing[self.launched] == 0:
            return self.buckets[self.launched]
        return None

    def launch_early(self, bucket: DeviceBucket, gradients: Sequence[Any], weight: float) -> list[bool]:
        """Launch a bucket before the step; see `next_ready`.

        Args:
            bucket: The result of `next_ready`.
            gradients: The gradients of the bucket, in the order of ``bucket.tensors``.
            weight: The weight of this rank. The weight of the first bucket counts for all early buckets of a step.

        Returns:
            For each gradient, whether it lay where the bucket expects it already.
        """
        if self.sent_weight is None:
            self.sent_weight = weight
        at_home = self._launch(bucket, gradients, self.sent_weight)
        self._seals.append(bucket.versions)
        self.launched += 1
        return at_home

    def what_changed(self, gradients: Sequence[Any], weight: float) -> str:
        """Return in words how the gradients and the weight differ from what was sent; an empty text if they do not.

        Args:
            gradients: All gradients of this rank, as they are now; None where this rank has none.
            weight: The weight of this rank.
        """
        if weight != self.sent_weight:
            return "the weight of the batch was set after the backward pass"
        for bucket, seal in zip(self.buckets, self._seals, strict=False):
            if bucket.versions != seal or not all(bucket.at_home([gradients[index] for index in bucket.tensors])):
                return "they were changed after the backward pass"
        return ""

    # A step

    def finish(self, gradients: Sequence[Any], said: Header) -> list[tuple[DeviceBucket, list[bool]]]:
        """Launch the remaining buckets. Afterwards the current stream waits for all buckets; the host does not wait.

        Args:
            gradients: All gradients of this rank; None where this rank has none.
            said: What this rank tells the other ranks.

        Returns:
            The buckets that were launched now, each with what `launch_early` returns.

        Raises:
            ArgumentError, MismatchError: A rank has reported a problem in an earlier step; see `LateChanges.check`.
            NcclError, PeerLeftError: An earlier exchange has failed.
        """
        self._tail.say(tuple([gradient is not None for gradient in gradients]), said)
        launched = []
        gradients = self._apart_from_buckets(gradients)
        for bucket in self.buckets[self.launched :]:
            mine = [gradients[index] for index in bucket.tensors]
            launched.append((bucket, self._launch(bucket, mine, said.weight)))
        with self._device.on(self._stream):
            self._changes.send(self._tail.memory, self._stream)
        self.wait()
        self.begin_step()
        return launched

    def _launch(self, bucket: DeviceBucket, gradients: Sequence[Any], weight: float) -> list[bool]:
        """Put the exchange of a bucket on the streams. See `launch_early` for the result."""
        tail, with_it = self._tail, []
        if bucket is self.buckets[0]:
            self._collectives.check()
            self._changes.check()
            tail.say_weight(weight)
            with_it = [] if tail.first is None else [tail.first]
        if bucket is self.buckets[-1]:
            with_it.append(tail.memory)
        stream = self._stream
        at_home = bucket.at_home(gradients)
        if renewed := bucket.leave_what_is_held(at_home):
            at_home = bucket.at_home(gradients)
            for memory in renewed:
                self._device.keep(memory, stream)
        bucket.pack(gradients, at_home, weight)
        bucket.scale_before(weight)
        stream.wait(self._device.current().record())
        with self._device.on(stream):
            bucket.exchange(stream, tail.weight, with_it)
        return at_home

    def wait(self) -> None:
        """Let the current stream wait for the launched buckets. The host does not wait."""
        self._device.current().wait(self._stream.record())

    def _apart_from_buckets(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients, with copies of those that lie at another gradient's place, which is about to be overwritten."""
        device = self._device
        memory = {device.allocation(flat.memory) for bucket in self.buckets for flat in bucket.flats}
        apart = list(gradients)
        for bucket in self.buckets[self.launched :]:
            mine = [gradients[index] for index in bucket.tensors]
            for index, gradient, home in zip(bucket.tensors, mine, bucket.at_home(mine), strict=True):
                if gradient is not None and not home and device.allocation(gradient) in memory:
                    apart[index] = device.cast(gradient, device.dtype(gradient))
        return apart

    # What the other ranks have said

    def find_out(self, there: list[bool], weight: float) -> bool:
        """Find out after `finish` whether other ranks have the gradients that this rank lacks. The host waits if it must ask.

        Args:
            there: For each gradient, whether this rank has it. Afterwards: whether any rank has it.
            weight: The weight of this rank. A rank without samples cannot know whether other ranks have samples, so it asks.

        Returns:
            Whether the rank had to ask. If so, `told` is new.
        """
        asks = weight == 0 or not all(there)
        if asks:
            self._merge(there)
        return asks

    def _merge(self, there: list[bool]) -> None:
        with self._waiting:
            self.told = self._tail.read()
        self._collectives.check()  # exchanges that were given up have ended too
        there[:] = [mine or somewhere for mine, somewhere in zip(there, self.told.anywhere, strict=True)]

    # This rank has run out of data, and other ranks have not

    def stand_in(self) -> list[bool] | None:
        """Take part in one step of the other ranks without data.

        Returns:
            For each gradient, whether any rank has one; None if all ranks have run out of data.
        """
        self._tail.say((False,) * self._count, Header(0.0, joined=True))
        for bucket in self.buckets:
            self._launch(bucket, [None] * len(bucket.tensors), 0.0)
        self.wait()
        there = [False] * self._count
        self._merge(there)
        return None if self.told.joined == self._collectives.size else there
