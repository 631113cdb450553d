"""Gradients that travel while the backward pass goes on, where a core is free for it.

A thread exchanges a bucket as soon as the backward pass has all of its gradients; the last one is exchanged by the step::

    backward   ── bucket 0 ──┬── bucket 1 ──┬── bucket 2 ──┐
    thread                   └─ exchange 0 ─┴─ exchange 1 ─┤
    step                                                   └─ exchange 2 ─ optimizer

This is a bet: that nobody touches the gradients between the backward pass and the step, that there is one backward pass to
a step, and that the batch weight is known before. What is exchanged is a copy, and the step compares it with the gradient. The
last bucket's header tells whether the bet is lost on any rank (accumulated, clipped or unscaled gradients, a late weight). All
buckets are then exchanged once more, so that the result is the same in any case.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from hvdlite.comm.host import PATIENT
from hvdlite.gradients.header import Header, HeaderSum
from hvdlite.gradients.reducer import Reducer
from hvdlite.timeline import Row

_JOIN_SECONDS = 1.0


class Overlap:
    """Exchanges the buckets of a reducer in a thread.

    Args:
        reducer: With several buckets. Used by this object alone from now on.
        before: Called with the number of a bucket before its exchange begins.

    Attributes:
        lost: How many steps had to repeat their exchanges; the same number on all ranks.
    """

    def __init__(self, reducer: Reducer, before: Callable[[int], None]) -> None:
        self.lost = 0
        self._before = before
        self._reducer = reducer
        self._host = reducer.buckets[0].host
        self._last = len(reducer.buckets) - 1
        self._bucket_of = {i: n for n, bucket in enumerate(reducer.buckets) for i in bucket.tensors}
        self._all_used = [True] * len(self._bucket_of)
        self._orders: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[HeaderSum | BaseException] = queue.SimpleQueue()
        self._begin_step()
        # A daemon: a rank that ends while its thread still waits for others must not wait for it.
        self._thread = threading.Thread(target=self._run, name="hvdlite-overlap", daemon=True)
        self._thread.start()

    def _begin_step(self) -> None:
        self._ready: set[int] = set()
        self._missing = [len(bucket.tensors) for bucket in self._reducer.buckets]
        self._launched = 0
        self._weight: float | None = None

    @property
    def under_way(self) -> int:
        """How many buckets the thread has, or has had, in this step."""
        return self._launched

    def may_copy(self, index: int) -> bool:
        """Whether the gradient of tensor `index` is to be copied before the step: no copy of it may be on its way."""
        return self._bucket_of[index] < self._last and index not in self._ready

    def has_copy(self, index: int) -> bool:
        """Whether a gradient of tensor `index` is where the reducer expects it."""
        return index in self._ready

    def is_under_way(self, index: int) -> bool:
        """Whether the thread has, or has had, the bucket of tensor `index`."""
        return self._bucket_of[index] < self._launched

    def ready(self, index: int, weight: float) -> None:
        """The gradient of tensor `index` is where the reducer expects it; `weight` is that of the batch."""
        self._ready.add(index)
        self._missing[self._bucket_of[index]] -= 1
        while self._launched < self._last and self._missing[self._launched] == 0:
            if self._weight is None:
                self._weight = weight
            self._before(self._launched)
            self._orders.put((self._launched, self._weight))
            self._launched += 1

    def finish(self, used: Sequence[bool], said: Header, changed: bool) -> list[bool]:
        """Exchange what has not been yet. As `Reducer.exchange`.

        Args:
            used, said: As there.
            changed: A gradient has changed since it was `ready`; where the reducer expects it, it is as it is now.
        """
        with self._reducer.timeline.span(Row.PROGRAM, "WAIT", "gradients"):
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
        lost = (
            changed
            or self._weight not in (None, weight)
            or not all(used[i] for bucket in self._reducer.buckets[: self._launched] for i in bucket.tensors)
        )
        told.append(self._reducer.exchange_bucket(self._last, used, said._replace(again=lost)))
        if told[-1].again and not told[-1].stopped:
            self.lost += told[-1].joined == 0  # those who have joined do not count it
            told = self._reducer.exchange_buckets(used, said)
        self._begin_step()
        self._reducer.next_step()
        return self._reducer.outcome(told)

    def drain(self) -> None:
        """Let what is under way on any rank end, in the middle of a step. All ranks do this. Results are worth nothing."""
        self.finish(self._all_used, Header(self._weight or 1.0), False)

    def close(self) -> None:
        """End the thread, when it is through with what it has."""
        self._orders.put(None)

    def join(self) -> None:
        """Wait for the end of the thread, which is closed, but not for what never ends."""
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
