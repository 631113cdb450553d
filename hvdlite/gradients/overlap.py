"""`Overlap`: gradients travel while the backward pass goes on, where a core is free for it.

A thread exchanges a bucket as soon as the backward pass has all of its gradients. The step exchanges the last bucket::

    backward   ── bucket 0 ──┬── bucket 1 ──┬── bucket 2 ──┐
    thread                   └─ exchange 0 ─┴─ exchange 1 ─┤
    step                                                   └─ exchange 2 ─ optimizer

This is speculation: it fails if a program changes gradients between the backward pass and the step (accumulated, clipped or
unscaled gradients), or sets the batch weight after the backward pass. The thread exchanges copies, and the step compares the
copies with the gradients. The header of the last bucket tells all ranks whether the speculation has failed on any rank. Then
all buckets are exchanged once more, so the result is right in any case.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from hvdlite.comm.host import PATIENT
from hvdlite.gradients.header import Header, HeaderSum
from hvdlite.gradients.reducer import Reducer

_JOIN_SECONDS = 1.0


class Overlap:
    """Exchanges the buckets of a reducer in a thread.

    Args:
        reducer: A reducer with several buckets. Only this object uses it from now on.
        before: Is called with the number of a bucket before the thread exchanges it.

    Attributes:
        failed: How many steps had to repeat their exchanges; the same number on all ranks.
    """

    def __init__(self, reducer: Reducer, before: Callable[[int], None]) -> None:
        self.failed = 0
        self._before = before
        self._reducer = reducer
        self._host = reducer.buckets[0].host
        self._last = len(reducer.buckets) - 1
        self._bucket_of = {i: n for n, bucket in enumerate(reducer.buckets) for i in bucket.tensors}
        self._all_used = [True] * len(self._bucket_of)
        self._orders: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[HeaderSum | BaseException] = queue.SimpleQueue()
        self._begin_step()
        # A daemon thread: a rank that ends must not wait for its thread, which may wait for other ranks.
        self._thread = threading.Thread(target=self._run, name="hvdlite-overlap", daemon=True)
        self._thread.start()

    def _begin_step(self) -> None:
        self._ready: set[int] = set()
        self._missing = [len(bucket.tensors) for bucket in self._reducer.buckets]
        self._launched = 0
        self._weight: float | None = None

    @property
    def under_way(self) -> int:
        """How many buckets the thread was given in this step."""
        return self._launched

    def may_copy(self, index: int) -> bool:
        """Return whether to copy the gradient of tensor `index` before the step: not if there is a copy already."""
        return self._bucket_of[index] < self._last and index not in self._ready

    def has_copy(self, index: int) -> bool:
        """Return whether a gradient of tensor `index` was copied to the reducer's memory in this step."""
        return index in self._ready

    def is_under_way(self, index: int) -> bool:
        """Return whether the thread was given the bucket of tensor `index` in this step."""
        return self._bucket_of[index] < self._launched

    def ready(self, index: int, weight: float) -> None:
        """Note that the gradient of tensor `index` is in the reducer's memory, and give complete buckets to the thread.

        Args:
            index: The number of the tensor.
            weight: The batch weight, as far as the program has set it.
        """
        self._ready.add(index)
        self._missing[self._bucket_of[index]] -= 1
        while self._launched < self._last and self._missing[self._launched] == 0:
            if self._weight is None:
                self._weight = weight
            self._before(self._launched)
            self._orders.put((self._launched, self._weight))
            self._launched += 1

    def finish(self, used: Sequence[bool], said: Header, changed: bool) -> list[bool]:
        """Exchange the remaining buckets, and all of them again if the speculation has failed on any rank.

        Args:
            used: See `Reducer.exchange`.
            said: See `Reducer.exchange`.
            changed: Whether a gradient has changed since it was `ready`. The reducer's memory has its present values.

        Returns:
            For each tensor, whether any rank has a gradient of it.

        Raises:
            Postponed, HvdliteError: See `Reducer.exchange`.
        """
        with self._reducer.timeline.wait("gradients"):
            return self._finish(used, said, changed)

    def _finish(self, used: Sequence[bool], said: Header, changed: bool) -> list[bool]:
        told, weight = [], said.weight
        for _ in range(self._launched):
            with self._reducer.waiting:
                result = self._results.get()
            if isinstance(result, BaseException):
                raise result
            told.append(result)
        for number in range(self._launched, self._last):
            told.append(self._reducer.exchange_bucket(number, used, Header(weight)))
        failed = (
            changed
            or self._weight not in (None, weight)
            or not all(used[i] for bucket in self._reducer.buckets[: self._launched] for i in bucket.tensors)
        )
        told.append(self._reducer.exchange_bucket(self._last, used, said._replace(again=failed)))
        if told[-1].again and not told[-1].stopped:
            self.failed += told[-1].joined == 0  # ranks that have joined do not count it
            told = self._reducer.exchange_buckets(used, said)
        self._begin_step()
        self._reducer.next_step()
        return self._reducer.outcome(told)

    def drain(self) -> None:
        """Finish the exchanges under way on any rank, in the middle of a step, and drop the results. Every rank calls this."""
        self.finish(self._all_used, Header(self._weight or 1.0), False)

    def close(self) -> None:
        """End the thread, after it has exchanged what it was given."""
        self._orders.put(None)

    def join(self) -> None:
        """Wait for the end of a thread that was closed; about a second, because its exchange may never end."""
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        self._reducer.works_for_another()
        while (order := self._orders.get()) is not None:
            number, weight = order
            result: HeaderSum | BaseException
            try:
                with self._host.patiently(PATIENT):  # the backward pass needs the core more
                    result = self._reducer.exchange_bucket(number, self._all_used, Header(weight))
            except BaseException as error:  # the step raises it
                result = error
            self._results.put(result)
