"""The buckets of one layout on a device, and the sequence in which this rank launches them.

::

    current stream   … backward ─┬─ pack bucket 0 … backward ─┬─ pack bucket 1 …   ┬─ pack the last ─┐        ┌─ step
    communication                └─▶ sum over the ranks, divide ─▶ sum, divide     └─▶ sum, divide ──┴─ event ┘

Every rank launches every bucket once for each step, in the same order, whatever it has; so no rank has to ask another. The
last one is launched by the step, the others as soon as their gradients are there, if the caller knows that they stay what they
are. If they do not, nothing can mend that without waiting for the other ranks in every step. It is an error, on all ranks: on
this one at once, on the others in their next steps, for the last bucket tells them (`hvdlite.gradients.device.late_changes`).

The host waits for the device only where it has to know what other ranks have said: in a step in which this rank lacks a
gradient, or has no samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from hvdlite.gpu.collectives import DeviceCollectives
from hvdlite.gradients.device.bucket import DeviceBucket
from hvdlite.gradients.device.late_changes import LateChanges
from hvdlite.gradients.header import Header, HeaderSum, read_tail


class DeviceReducer:
    """The gradients of one model on a device, on one rank. All ranks make one, with equal buckets.

    Args:
        buckets: In the order of their launches; at least one.
        count: The number of gradients.
        collectives: Of the buckets.
        waiting: For a with statement: the host waits for what other ranks say.

    Attributes:
        buckets: As given.
        launched: How many of them are under way in this step.
        sent_weight: This rank's weight when the first was launched before the step; None if none was.
        told: What the ranks have said in the last bucket of the latest step that this rank has asked about.
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
        self.told = HeaderSum([], 1.0)
        # The reducer may be dropped while gradients are on their way.
        for tensor in (self._changes.memory, *(each for bucket in self.buckets for each in bucket.memory())):
            self._device.keep(tensor, self._stream)
        self.begin_step()

    def begin_step(self) -> None:
        """What is under way belongs to no step any more, if anything is."""
        self.launched = 0
        self.sent_weight: float | None = None
        self._seals: list[tuple[int, ...]] = []
        """Of each bucket that is launched: the versions of its memory then."""
        self._missing = [len(bucket.tensors) for bucket in self.buckets]

    def sent_memory(self) -> list[Any]:
        """What the gradients that are under way lie in."""
        return [flat.memory for bucket in self.buckets[: self.launched] for flat in bucket.flats]

    # Before a step

    def is_sent(self, index: int) -> bool:
        """Whether gradient `index` is under way."""
        return self._bucket_of[index] < self.launched

    def ready(self, index: int) -> bool:
        """This rank has gradient `index`, which stays what it is until the step. Called once for each step, at most.

        Returns:
            Whether a bucket is to be launched now; see `next_ready`.
        """
        missing = self._missing
        missing[self._bucket_of[index]] -= 1
        return missing[self.launched] == 0 and self.launched < len(missing) - 1

    def next_ready(self) -> DeviceBucket | None:
        """The bucket that is to be launched now (`launch_early`); None if gradients of it are missing, or if it is the last."""
        if self.launched < len(self.buckets) - 1 and self._missing[self.launched] == 0:
            return self.buckets[self.launched]
        return None

    def launch_early(self, bucket: DeviceBucket, gradients: Sequence[Any], weight: float) -> None:
        """Launch a bucket before the step; see `next_ready`.

        Args:
            bucket: What `next_ready` has said.
            gradients: In the order of ``bucket.tensors``.
            weight: This rank's. In one step it is the same for all.
        """
        if self.sent_weight is None:
            self.sent_weight = weight
        self._launch(bucket, gradients, Header(self.sent_weight))
        self._seals.append(bucket.versions)
        self.launched += 1

    def what_changed(self, gradients: Sequence[Any], weight: float) -> str:
        """In what this step is not what was sent; empty if it is.

        Args:
            gradients: All of this rank's, as they are now; None where it has none.
            weight: This rank's.
        """
        if weight != self.sent_weight:
            return "the weight of the batch was set after the backward pass"
        for bucket, seal in zip(self.buckets, self._seals, strict=False):
            if bucket.versions != seal or not all(bucket.at_home([gradients[index] for index in bucket.tensors])):
                return "they were changed after the backward pass"
        return ""

    # A step

    def finish(self, gradients: Sequence[Any], said: Header) -> None:
        """Launch what has not been yet. Afterwards the current stream waits for all of it; the host does not.

        Args:
            gradients: All of this rank's; None where it has none.
            said: What this rank says.

        Raises:
            ArgumentError, MismatchError: What was said in an earlier step; see `LateChanges.check`.
            NcclError, PeerLeftError: An earlier exchange has failed.
        """
        gradients = self._apart_from_buckets(gradients)
        last = self.buckets[-1]
        for bucket in self.buckets[self.launched :]:
            # Only the last bucket's tail is read by all.
            words = said if bucket is last else said._replace(state=0)
            self._launch(bucket, [gradients[index] for index in bucket.tensors], words)
        with self._device.on(self._stream):
            self._changes.send(last.tail, self._stream)
        self.wait()
        self.begin_step()

    def _launch(self, bucket: DeviceBucket, gradients: Sequence[Any], said: Header) -> None:
        """Put the exchange of a bucket on the streams."""
        if bucket is self.buckets[0]:
            self._collectives.check()
            self._changes.check()
        stream = self._stream
        at_home = bucket.at_home(gradients)
        if renewed := bucket.leave_what_is_held(at_home):
            at_home = bucket.at_home(gradients)
            for memory in renewed:
                self._device.keep(memory, stream)
        bucket.pack(gradients, at_home, said.weight)
        bucket.say(tuple([gradient is not None for gradient in gradients]), said)
        bucket.scale_before(said.weight)
        stream.wait(self._device.current().record())
        with self._device.on(stream):
            bucket.exchange(stream)

    def wait(self) -> None:
        """Let the current stream wait for what is on its way. The host does not."""
        self._device.current().wait(self._stream.record())

    def _apart_from_buckets(self, gradients: Sequence[Any]) -> list[Any]:
        """Copies of those gradients that lie where another one is expected (swapped ones): that is about to be overwritten."""
        device = self._device
        memory = {device.allocation(flat.memory) for bucket in self.buckets for flat in bucket.flats}
        apart = list(gradients)
        for bucket in self.buckets:
            mine = [gradients[index] for index in bucket.tensors]
            for index, gradient, home in zip(bucket.tensors, mine, bucket.at_home(mine), strict=True):
                if gradient is not None and not home and device.allocation(gradient) in memory:
                    apart[index] = device.cast(gradient, device.dtype(gradient))
        return apart

    # What the others have said

    def find_out(self, there: list[bool], weight: float) -> bool:
        """Where this rank has no gradient, find out whether another one has, after `finish`. The host waits, if it must ask.

        Args:
            there: For each gradient, whether this rank has one; becomes whether any rank has.
            weight: This rank's: without samples it cannot know whether others have some.

        Returns:
            Whether it had to ask; then `told` is new.
        """
        asks = [bucket for bucket in self.buckets if weight == 0 or not all([there[i] for i in bucket.tensors])]
        if asks:
            self._merge(there, asks)
        return bool(asks)

    def _merge(self, there: list[bool], buckets: Sequence[DeviceBucket]) -> None:
        for bucket, told in zip(buckets, self._read(buckets), strict=True):
            self.told = told
            for index, somewhere in zip(bucket.tensors, told.anywhere, strict=True):
                there[index] = there[index] or somewhere

    def _read(self, buckets: Sequence[DeviceBucket]) -> list[HeaderSum]:
        """The tails of buckets that the current stream has waited for. The host waits."""
        ends = list(itertools.accumulate([self._device.count(bucket.tail) for bucket in buckets], initial=0))
        together = self._device.empty([ends[-1]], "float64")
        self._device.pack([bucket.tail for bucket in buckets], together)
        with self._waiting:
            values = self._device.to_host(together).tolist()
        self._collectives.check()  # what is given up ends, too
        return [read_tail(values[start:stop]) for start, stop in itertools.pairwise(ends)]

    # This rank has run out of data, and others have not

    def stand_in(self) -> list[bool] | None:
        """Take part in one step of the others with nothing.

        Returns:
            For each gradient, whether any rank has one; None if all ranks have run out of data.
        """
        nothing = Header(0.0, joined=True)
        for bucket in self.buckets:
            self._launch(bucket, [None] * len(bucket.tensors), nothing)
        self.wait()
        there = [False] * self._count
        self._merge(there, self.buckets)
        return None if self.told.joined == self._collectives.size else there
